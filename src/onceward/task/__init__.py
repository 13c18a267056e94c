"""The engine: transactions through a strict lifecycle, in threads and in asyncio. Knows no driver, SQL or wire."""
