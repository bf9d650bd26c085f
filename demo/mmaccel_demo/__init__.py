"""The demo: a question answered in full and accelerated, and what became of every visual token.

``engine`` asks and measures, ``overlay`` and ``cards`` make HTML of it, ``limits`` says what strangers may send; none of them
knows Gradio. ``page`` puts them on a page, ``serve`` starts it.
"""
