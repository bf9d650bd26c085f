"""A server that speaks OpenAI's chat completions API, for every recipe, cache policies and codecs included.

``app`` the HTTP routes, ``connections`` limits on connections, ``body`` bounded JSON parsing, ``schema`` validation of a
request, ``sources`` where media may be loaded from, ``scheduler`` the request queue, ``engine`` generation with one model,
``sampling`` and ``detokenizer`` its tokens and text, ``metrics`` the figures for Prometheus, ``errors`` error responses,
``server`` the process around the application.

It stands on Starlette, pydantic and uvicorn, which the extra ``serving`` of transformers installs too, and not on the classes
of ``transformers serve``. Those have no place for what belongs to one request here: their handler calls
``apply_chat_template`` on the event loop, with whatever address or path a client names and without limits, and ``generate``
without ``mmaccel=``; it seeds the whole process, queues without end, and can stop only what is streamed, at its next token.
Each of these would be an override of ``ChatCompletionHandler.handle_request`` as a whole, which is a copy of it, and
``build_server`` takes other handlers in transformers 5.23 than in 5.17. For a plain ``transformers serve`` with a recipe see
``examples/transformers_serve.py``.
"""
