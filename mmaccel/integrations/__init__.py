"""mmaccel inside other people's programs; nothing here is imported unless that program asks for it."""
