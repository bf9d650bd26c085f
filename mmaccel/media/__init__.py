"""Pictures and clips from files, prompts about them, pixels before the processor, reductions drawn over pictures."""
