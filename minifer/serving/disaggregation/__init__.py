"""Prefill here, decode there: KV blocks handed from one engine to another."""
