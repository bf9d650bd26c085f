"""Visual tokens as data: where they stand in the prompt, how many stay, and which of them flow into which."""
