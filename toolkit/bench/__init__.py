"""Load on a running endpoint: trace windows replayed, measured beside predicted."""
