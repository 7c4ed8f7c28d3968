"""Speed under load: many requests, in one process or over HTTP."""
