"""Requests and responses as types, and the OpenAPI document."""
