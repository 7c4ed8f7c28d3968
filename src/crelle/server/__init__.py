"""The HTTP server: OpenAI's protocol over one engine. docs/guide/serve.md is for those who run it.

    client ──▶ middleware, hosts ──▶ bodies ──▶ handlers ──▶ validation, requests ──▶ AsyncEngine.submit   event loop
    client ◀── responses ◀── event_queue ◀──────────────────────────────────────── events   the engine's thread

What is large is parsed (strict_json), checked, tokenized and written by two worker threads: see State.

schemas.py says what requests and responses look like; validation.py checks requests against it and openapi.py publishes
it, so that the document at /openapi.json cannot say anything else than what is done. aiohttp is needed by bodies.py,
hosts.py, reply.py and from middleware.py up.
"""
