"""Helpers for web frameworks: `onceward.web.fastapi`, and the Django app `onceward.web.django`."""
