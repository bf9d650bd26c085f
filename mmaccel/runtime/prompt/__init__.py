"""The prompt in front of the language model: reducing visual tokens, positions, looks ahead, drafts."""
