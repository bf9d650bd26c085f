"""Training of small networks that say which visual tokens a frozen model needs."""
