"""A Django app with the command `manage.py onceward`: add "onceward.web.django" to INSTALLED_APPS, and name the app in
ONCEWARD_APP = "shop.events:app"."""
