"""HTTP itself: bodies, replies, middleware, the hosts that may ask."""
