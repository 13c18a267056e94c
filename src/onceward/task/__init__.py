"""The engine: takes transactions through a strict lifecycle, in threads or asyncio. No drivers, SQL or protocols."""
