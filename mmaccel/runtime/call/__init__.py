"""One call of an accelerated model: its plan, its forwards of the text model, the hooks and the attention function."""
