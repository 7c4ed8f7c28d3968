"""The HTTP server: OpenAI's protocol over one engine. docs/serving.md is for those who run it.

    client ──▶ guard ──▶ handlers ──▶ schema, ask ──▶ Service.submit          the event loop
    client ◀── shapes ◀── inbox ◀──────────────────── events                  the engine's thread

tables.py says what requests and answers look like; schema.py checks requests against it and openapi.py publishes it,
so that the document at /openapi.json cannot say anything else than what is done. aiohttp is needed from guard.py up.
"""
