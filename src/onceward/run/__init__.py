"""Run an app: supervised worker processes, signals, health.

supervisor ──starts──► worker processes ──each──► every consumer of the app, in threads or in asyncio
    │  ▲                     │
    │  └────── status ───────┘   one line per second, through a pipe
    ├─── drain, hurry ──────►    through another pipe; when it closes, the supervisor is gone
    └─── /livez /readyz /progress /metrics
"""
