"""Visual tokens as data: their places in the prompt, budgets, and reductions; and small modules that every room uses."""
