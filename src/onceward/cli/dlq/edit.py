"""`onceward dlq edit`: correct the payload of a dead letter."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onceward.cli.database import Database
from onceward.cli.dlq.options import Operator, open_letters, who
from onceward.cli.dlq.redrive import TASK
from onceward.cli.exit import FAILED, AsJson, argument, fail, option, refuse_path
from onceward.cli.output import echo, print_result

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetters
    from onceward.deadletters.edits import Draft

EDITORS = ("VISUAL", "EDITOR")
USUAL_EDITOR = "vi"


def edit(
    letter_id: Annotated[int, argument("ID", "Number in `onceward dlq list`.")],
    database: Database,
    cause: Annotated[str, option("TEXT", "Why the payload is wrong; kept in the audit log.")],
    task: Annotated[str, option("MODULE:NAME", TASK)],
    file: Annotated[
        Path | None,
        option("FILE", "The new payload as JSON, or - for standard input.", show_default="an editor"),
    ] = None,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Correct the payload of an open letter, for its next redrive.

    Opens `$VISUAL` or `$EDITOR` on the payload as JSON, or takes a file. First the consumer runs with the new payload
    in a transaction that is rolled back; if the letter would die again, the edit is refused. The delivered bytes
    stay, and so do id and time: `dlq show --original` shows them. If the event was already applied, it does not run
    again. The audit log records who, why, and the digests before and after.

    Exit code: 0, also if nothing has changed; 1 if it is refused, the editor or the database fails; 2 for wrong
    arguments or missing tables.
    """
    from onceward._sync import run_blocking
    from onceward.deadletters import edits

    with open_letters(database, as_json) as letters:
        operations = letters.operations
        edits.check_cause(cause)
        draft = run_blocking(operations.draft(letter_id))
        edits.check(draft.letter)
        if file is not None:
            content = _read(file, as_json)
            _change(letters, draft, draft.with_file(content), task, cause, who(operator), as_json)
            return
        kept = _edit(draft, as_json)
        try:
            body = draft.with_payload(edits.parse(kept.read_bytes()))
            _change(letters, draft, body, task, cause, who(operator), as_json)
        except BaseException:
            echo(f"Your text is in {kept}; continue with --file {kept}", err=True)
            raise
        kept.unlink()


def _change(
    letters: DeadLetters, draft: Draft, body: bytes, task_path: str, cause: str, operator: str, as_json: bool
) -> None:
    from onceward._sync import run_blocking
    from onceward.app.rehearsal import PREDICTED, predict_edit
    from onceward.cli.dlq.dry_run import build_task
    from onceward.deadletters.dry_run import check_consumer

    letter, output = draft.letter, {"id": draft.letter.id, "edited": False, "prediction": None}
    if not draft.changes(body):
        print_result(output, f"The payload of letter {letter.id} is the same. Nothing was changed.", as_json)
        return
    engine: Any = letters.operations.ports.engine  # type: ignore[attr-defined]
    task = build_task(task_path, engine)
    check_consumer(task, f"--task {task_path}", letter.consumer)
    prediction = predict_edit(task, draft, body, engine)
    run_blocking(letters.operations.store_edit(draft, body, cause, operator, prediction))
    text = (
        f"Letter {letter.id} is edited. With the new payload it {PREDICTED[prediction.outcome]}. Redrive it with "
        f"`onceward dlq redrive --consumer {letter.consumer} --id {letter.id} --cause-category {letter.category} "
        "--root-cause … --fix-ref …`"
    )
    print_result({**output, "edited": True, "prediction": prediction}, text, as_json)


def _read(file: Path, as_json: bool) -> bytes:
    with refuse_path(file, as_json, code=FAILED):
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()


def _edit(draft: Draft, as_json: bool) -> Path:
    """Let the operator edit the payload; return the file, which only they can read."""
    text = draft.as_text()
    editor = next((os.environ[name] for name in EDITORS if os.environ.get(name, "").strip()), None)
    if editor is None and not sys.stdin.isatty():
        fail("there is no terminal for an editor; use --file, or set VISUAL or EDITOR", as_json)
    editor = editor or USUAL_EDITOR
    descriptor, name = tempfile.mkstemp(prefix=f"letter-{draft.letter.id}-", suffix=".json")
    kept = Path(name)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
    try:
        code = subprocess.run([*shlex.split(editor), name], check=False).returncode
    except (OSError, ValueError) as error:
        kept.unlink()
        fail(
            f"the editor {editor!r} cannot be started: {error}; set VISUAL or EDITOR, or use --file", as_json
        )
    left = kept.read_text(encoding="utf-8", errors="replace") if kept.is_file() else ""
    if not left.strip() or (code and left == text):
        kept.unlink(missing_ok=True)
        what = f"ended with exit code {code}" if code else "left no text"
        fail(f"the editor {editor!r} {what}; nothing was changed", as_json)
    if code:
        fail(
            f"the editor {editor!r} ended with exit code {code}; nothing was changed. Your text is in {kept}; continue "
            f"with --file {kept}",
            as_json,
        )
    return kept
