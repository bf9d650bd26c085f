"""Search for the recipe that keeps a model's answers to given questions at the least cost."""
