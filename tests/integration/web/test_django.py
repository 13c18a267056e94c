"""`manage.py onceward`, in a real Django project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

FILES = {
    "manage.py": """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
""",
    "settings.py": """
SECRET_KEY = "only for this test"
INSTALLED_APPS = ["orders", "onceward.web.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
ONCEWARD_APP = "events:app"
""",
    "orders/__init__.py": "",
    "orders/models.py": """
from django.db import models

class Order(models.Model):
    name = models.CharField(max_length=20, unique=True)
""",
    "events.py": """
from onceward import Onceward
from orders.models import Order

app = Onceward("shop", database="sqlite:///shop.db")

@app.consumer("sqlite:///queue.db", contract=None)
def take(order: dict):
    Order.objects.get_or_create(name=order["name"])
""",
    "send.py": """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from onceward.web.django.project import app
from django.db import connection, transaction
from events import take
from orders.models import Order

with transaction.atomic():
    Order.objects.create(name="direct")
    app.outbox(connection).send(take, {"name": "sent"})
""",
    "show.py": """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
import django
django.setup()
from orders.models import Order
print(sorted(Order.objects.values_list("name", flat=True)))
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "orders").mkdir()
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    return tmp_path


def run(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{project}", **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.req("IN-16")
def test_the_commands_of_onceward_run_for_the_app_of_the_project(project: Path) -> None:
    for command in (["migrate", "--run-syncdb"], ["onceward", "migrate"]):
        done = run(project, "manage.py", *command)
        assert done.returncode == 0, done.stderr
    assert "migrations applied" in done.stdout
    sent = run(project, "send.py")
    assert sent.returncode == 0, sent.stderr
    worked = run(project, "manage.py", "onceward", "run", "--drain")
    worked = run(project, "manage.py", "onceward", "run", "--drain")  # the relay may end after the consumer
    assert worked.returncode == 0, worked.stderr
    assert run(project, "show.py").stdout.strip() == "['direct', 'sent']"


TESTS = """
from django.db import connection
from django.test import TestCase
from events import app, take
from orders.models import Order


class Sends(TestCase):
    def test_a_message_and_a_row_are_in_the_test_database(self):
        Order.objects.create(name="direct")
        app.outbox(connection).send(take, {"name": "sent"})
        with connection.cursor() as cursor:
            self.assertEqual(cursor.execute("SELECT count(*) FROM onceward_outbox").fetchone(), (1,))
"""


@pytest.mark.req("IN-16")
def test_tests_of_django_send_as_the_page_says(project: Path) -> None:
    page = (ROOT / "docs/how-to/outbox-django.md").read_text()
    blocks = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', page, re.DOTALL))
    settings = project / "settings.py"
    settings.write_text(settings.read_text() + blocks["settings.py"])
    (project / "shop_events.py").write_text("from events import app as shop\n")
    (project / "orders/tests.py").write_text(TESTS)
    (project / "orders/migrations").mkdir()
    (project / "orders/migrations/__init__.py").touch()
    made = run(project, "manage.py", "makemigrations", "orders")
    assert made.returncode == 0, made.stderr
    (project / "orders/migrations/0002_onceward.py").write_text(blocks["orders/migrations/0002_onceward.py"])
    (project / "shop.db").unlink(missing_ok=True)
    tested = run(project, "manage.py", "test", ONCEWARD_DATABASE="sqlite:///test.db")
    assert tested.returncode == 0, tested.stderr
    assert "Ran 1 test" in tested.stderr
    assert not (project / "shop.db").exists()


@pytest.mark.req("IN-16")
def test_mistakes_say_what_to_write(project: Path) -> None:
    unknown = run(project, "manage.py", "onceward", "dance")
    assert unknown.returncode == 2
    assert "there is no command 'dance' here" in unknown.stderr
    settings = project / "settings.py"
    settings.write_text(settings.read_text().replace("ONCEWARD_APP", "OTHER"))
    unnamed = run(project, "manage.py", "onceward", "run")
    assert unnamed.returncode == 2
    assert "write ONCEWARD_APP = 'shop.events:app'" in unnamed.stderr
