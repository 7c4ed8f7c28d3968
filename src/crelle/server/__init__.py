"""The HTTP server: OpenAI's protocol over one engine. docs/serving.md is for those who run it.

    client ──▶ guard, hosts ──▶ bodies ──▶ handlers ──▶ schema, ask ──▶ AsyncEngine.submit    the event loop
    client ◀── shapes ◀── inbox ◀────────────────────────────────────── events            the engine's thread

What is large is parsed (strict_json), checked, tokenized and written by two worker threads: see State.

tables.py says what requests and answers look like; schema.py checks requests against it and openapi.py publishes it,
so that the document at /openapi.json cannot say anything else than what is done. aiohttp is needed
by bodies.py, hosts.py, reply.py and from guard.py up.
"""
