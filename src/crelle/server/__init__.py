"""The HTTP server: OpenAI's protocol over one engine. docs/guide/serve.md is for those who run it.

    client ──▶ middleware, hosts ──▶ bodies ──▶ handlers ──▶ validation, requests ──▶ AsyncEngine.submit   event loop
    client ◀── responses ◀── event_queue ◀──────────────────────────────────────── events   the engine's thread

What is large is parsed (strict_json), checked, tokenized and written by two worker threads: see State.

schemas.py and response_schemas.py say what requests and answers look like, as msgspec structs; validation.py checks
requests by them and openapi.py publishes them, so that the document at /openapi.json cannot say anything else than what
is done. The extra `server` installs what this folder needs: aiohttp, msgspec, prometheus-client.
"""
