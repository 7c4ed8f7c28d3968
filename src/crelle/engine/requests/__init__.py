"""A request and its sequences: admission, the handle its caller holds, its outputs."""
