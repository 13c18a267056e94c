"""Running an app: supervised worker processes, signals, health.

supervisor ──starts──► worker processes ──each──► every consumer of the app, in threads or in asyncio
    │  ▲                     │
    │  └─── what they do ────┘   a line a second, through a pipe
    ├─── drain, hurry ──────►    through another pipe, whose end also says that the supervisor is gone
    └─── /livez /readyz /progress /metrics
"""
