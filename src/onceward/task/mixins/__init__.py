"""Mixins for task classes, their policies, and helpers."""
