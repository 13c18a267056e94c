"""How Django knows this app."""

from __future__ import annotations

from django.apps import AppConfig


class OncewardConfig(AppConfig):  # type: ignore[misc]
    name = "onceward.web.django"
    label = "onceward"
    verbose_name = "onceward"
