"""Three ways to apply a fact that may come again, on SQLite and PostgreSQL, in threads and in asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, text

from onceward._sync import run_blocking
from onceward.boundary import Envelope, StoredFact, fact_of
from onceward.boundary.errors import Unavailable
from onceward.boundary.strategies import DAY, FACT_DAYS, LatestPerKey, OncePerId, idempotent_outcome
from onceward.errors import ConfigurationError
from onceward.testing.outcomes import check_idempotent_outcome
from tests.support.boundary.consumer_world import NAME, Awaited, BoundaryWorld, book

if TYPE_CHECKING:
    from tests.support.databases import Database

pytest_plugins = ("tests.support.databases",)

SET_LEVEL = """
    INSERT INTO levels (tank, level) VALUES (:tank, :level)
    ON CONFLICT (tank) DO UPDATE SET level = excluded.level
"""


@pytest.fixture
def world(database: Database, tmp_path: Path) -> Iterator[BoundaryWorld]:
    with BoundaryWorld(database, tmp_path) as made:
        yield made


def stored(
    offset: int,
    value: Any = None,
    *,
    subject: str = "tank:T1",
    predicate: str = "measured",
    at: float = 0.0,
    begins: int | None = None,
    id: str | None = None,
) -> StoredFact:
    """A fact as a boundary serves it."""
    envelope = Envelope(
        message_id=id or f"message-{offset}", from_zone="a", to_zone="b", produced_at_unix_ms=1
    )
    return StoredFact(
        offset=offset,
        envelope=envelope,
        fact=fact_of(subject, predicate, {} if value is None else value),
        appended_at_unix_ms=int(at * 1000),
        log_begins_at=begins,
    )


def apply(world: BoundaryWorld, handler: Any, *facts: StoredFact) -> None:
    """Each in its own transaction, as a consumer does."""
    for fact in facts:
        world.in_session(lambda session, fact=fact: handler(fact, session))


def losing_confirms(world: BoundaryWorld, handler: Any, times: int) -> None:
    """A consumer whose confirms never arrive, so the same batch comes again and again; then they do."""
    for _ in range(times):
        world.server.failing["confirm"].append(Unavailable("cut"))
        with pytest.raises(Unavailable):
            world.consumer().run(handler, world.database.default, drain=True)
    world.consumer().run(handler, world.database.default, drain=True)


# ── 1: a table of processed ids ─────────────────────────────────────────────────────────────────────────


@pytest.fixture
def once(world: BoundaryWorld) -> OncePerId:
    made = OncePerId(NAME)
    world.in_session(made.create_table)
    world.in_session(made.create_table)  # again changes nothing
    return made


@pytest.mark.req("BC-07")
def test_a_batch_that_comes_again_has_its_effects_once(world: BoundaryWorld, once: OncePerId) -> None:
    world.append(1, 2, 3)
    losing_confirms(world, once(world.handler(book)), times=2)
    assert world.effects() == [1, 2, 3]
    assert world.cursor() == 3


@pytest.mark.req("BC-07")
def test_the_id_is_written_in_the_transaction_of_the_outcome(world: BoundaryWorld, once: OncePerId) -> None:
    world.append(1)
    fails = True

    async def fragile(fact: Any, session: Awaited) -> None:
        await book(fact, session)
        assert await session.execute_scalar("SELECT count(*) FROM onceward_processed_facts") == 1
        if fails:
            raise RuntimeError("no")

    handler = once(world.handler(fragile))
    with pytest.raises(RuntimeError, match="no"):
        world.consumer().run(handler, world.database.default, drain=True)
    assert world.effects() == []
    assert world.database.scalar("SELECT count(*) FROM onceward_processed_facts") == 0, "neither is there"
    fails = False
    world.consumer().run(handler, world.database.default, drain=True)
    assert world.effects() == [1]
    assert world.database.scalar("SELECT message_id FROM onceward_processed_facts") == "message-1", "both are"


@pytest.mark.req("BC-07", "BC-50")
def test_ids_are_kept_for_seven_days_to_the_second_and_go_afterwards(world: BoundaryWorld) -> None:
    time = 1_000_000_000.0
    once = OncePerId(NAME, clock=lambda: time)
    other = OncePerId("another", clock=lambda: time)
    world.in_session(once.create_table)
    assert FACT_DAYS == 7
    handler = once(world.handler(book))
    apply(world, handler, stored(1, {"number": 1}))
    apply(world, other(world.handler(book)), stored(1, {"number": 100}))
    time += 1
    apply(world, handler, stored(9, {"number": 9}, begins=2))

    for age in (7 * DAY - 1, 7 * DAY):
        time = 1_000_000_000 + age
        assert world.in_session(once.purge) == 0
        apply(world, handler, stored(1, {"number": 1}))
        assert sorted(world.effects()) == [1, 9, 100], "a fact that may still be retained is still known"
    time = 1_000_000_000 + 7 * DAY + 1
    assert world.in_session(once.purge) == 1
    of = "SELECT message_id FROM onceward_processed_facts WHERE consumer_name ="
    assert world.database.scalar(f"{of} 'another'") == "message-1"
    assert world.database.scalar(f"{of} '{NAME}'") == "message-9"


@pytest.mark.req("BC-50")
def test_an_id_is_kept_for_its_newest_copy_in_the_log(world: BoundaryWorld) -> None:
    time = 1_000_000_000.0
    once = OncePerId(NAME, clock=lambda: time)
    world.in_session(once.create_table)
    handler = once(world.handler(book))
    apply(world, handler, stored(5, {"number": 1}, begins=1, id="repeated"))
    time += 7 * DAY + 60
    # The boundary has forgotten the id, so it appended what the producer repeated. An older copy comes late.
    newest = stored(100, {"number": 1}, begins=90, id="repeated")
    apply(world, handler, newest, stored(5, {"number": 1}, begins=1, id="repeated"))
    apply(world, handler, stored(101, {"number": 2}, begins=90))
    assert world.in_session(once.purge) == 0, "the boundary has the copy at 100"
    apply(world, handler, newest)
    assert world.effects() == [1, 2]
    apply(world, handler, stored(102, {"number": 3}, begins=101))
    assert world.in_session(once.purge) == 0, "the copy came less than seven days ago"
    time += 7 * DAY + 60
    apply(world, handler, stored(103, {"number": 4}, begins=101))
    assert world.in_session(once.purge) == 1


@pytest.mark.req("BC-50")
def test_an_id_is_kept_until_the_boundary_no_longer_has_its_fact(world: BoundaryWorld) -> None:
    time = 1_000_000_000.0
    once = OncePerId(NAME, keep_days=1, clock=lambda: time)
    world.in_session(once.create_table)
    handler = once(world.handler(book))
    for number in range(1, 6):
        apply(world, handler, stored(number, {"number": number}, begins=1))
    time += 10 * DAY
    assert world.in_session(once.purge) == 0, "the boundary has not removed them yet"
    for number in range(1, 6):
        apply(world, handler, stored(number, {"number": number}, begins=1))
    assert world.effects() == [1, 2, 3, 4, 5]
    apply(world, handler, stored(6, {"number": 6}, begins=4))
    assert world.in_session(once.purge) == 3
    apply(world, handler, stored(7, {"number": 7}))
    assert world.in_session(once.purge) == 0, "it is not known what the boundary has"


@pytest.mark.req("BC-50")
def test_a_boundary_says_where_its_log_begins_and_ids_of_what_it_serves_survive_a_purge(
    world: BoundaryWorld,
) -> None:
    time = 1_000_000_000.0
    once = OncePerId(NAME, keep_days=1, clock=lambda: time)
    world.in_session(once.create_table)
    handler = once(world.handler(book))
    world.append(1, 2, 3, 4, 5)
    world.server.failing["confirm"].append(Unavailable("cut"))
    with pytest.raises(Unavailable):
        world.consumer().run(handler, world.database.default, drain=True)
    time = 4_000_000_000.0
    assert world.in_session(once.purge) == 0
    world.consumer().run(handler, world.database.default, drain=True)
    assert world.effects() == [1, 2, 3, 4, 5]

    world.server.ask(world.server.store.expire({"operational": 10**15}))
    world.append(6)
    world.server.stop()
    world.server.start()
    world.consumer().run(handler, world.database.default, drain=True)
    assert world.in_session(once.purge) == 5
    assert world.effects() == [1, 2, 3, 4, 5, 6]


@pytest.mark.req("BC-50")
def test_a_table_of_an_earlier_version_gets_its_columns_and_its_rows_stay(world: BoundaryWorld) -> None:
    world.database.do(
        "CREATE TABLE onceward_processed_facts (consumer_name VARCHAR(400) NOT NULL, message_id VARCHAR(400) NOT NULL, "
        "seen_at DOUBLE PRECISION NOT NULL, PRIMARY KEY (consumer_name, message_id))"
    )
    world.database.do(f"INSERT INTO onceward_processed_facts VALUES ('{NAME}', 'message-1', 1.0)")
    once = OncePerId(NAME)
    world.in_session(once.create_table)
    world.in_session(once.create_table)
    apply(world, once(world.handler(book)), stored(1, {"number": 1}), stored(2, {"number": 2}, begins=2))
    assert world.effects() == [2]
    assert world.in_session(once.purge) == 0


@pytest.mark.req("BC-07")
def test_an_id_is_kept_as_long_as_the_fact_even_where_the_clock_is_behind_the_boundary(
    world: BoundaryWorld,
) -> None:
    time = 1_000_000_000.0
    once = OncePerId(NAME, keep_days=1, clock=lambda: time)
    world.in_session(once.create_table)
    apply(world, once(world.handler(book)), stored(1, {"number": 1}, at=time + 3600))
    time += DAY + 3600
    apply(world, once(world.handler(book)), stored(2, {"number": 2}, begins=2))
    assert world.in_session(once.purge) == 0
    time += 1
    assert world.in_session(once.purge) == 1


def test_two_readers_of_one_name_have_each_effect_once(world: BoundaryWorld, once: OncePerId) -> None:
    world.append(1, 2, 3)
    handler = once(world.handler(book))
    slow = world.client.fetch(NAME).facts
    world.consumer().run(handler, world.database.default, drain=True)
    apply(world, handler, *slow)  # the other one has done and confirmed everything in the meantime
    assert world.client.confirm(NAME, slow[-1].offset) == 3
    assert world.effects() == [1, 2, 3]


# ── 2: a natural key ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def latest(world: BoundaryWorld) -> LatestPerKey:
    made = LatestPerKey(NAME, key=lambda fact: fact.fact.object["tank"])
    world.in_session(made.create_table)
    world.in_session(made.create_table)
    world.database.do("CREATE TABLE levels (tank VARCHAR(20) PRIMARY KEY, level INTEGER)")
    return made


@pytest.fixture
def levels(world: BoundaryWorld) -> Callable[[], dict[str, int]]:
    def levels() -> dict[str, int]:
        with world.database.session() as session:
            return {row["tank"]: row["level"] for row in session.fetch_all("SELECT tank, level FROM levels")}

    return levels


async def set_level(fact: Any, session: Awaited) -> None:
    value = fact.fact.object
    await session.execute(SET_LEVEL, {"tank": value["tank"], "level": value["level"]})


def level(offset: int, tank: str, level: int, **more: Any) -> StoredFact:
    return stored(offset, {"tank": tank, "level": level}, **more)


@pytest.mark.req("BC-08")
def test_an_older_fact_that_comes_again_does_not_overwrite_newer_state(
    world: BoundaryWorld, latest: LatestPerKey, levels: Callable[[], dict[str, int]]
) -> None:
    applied: list[int] = []

    async def noting(fact: Any, session: Awaited) -> None:
        applied.append(fact.offset)
        await set_level(fact, session)

    handler = latest(world.handler(noting))
    facts = [level(1, "T1", 10), level(2, "T2", 20), level(3, "T1", 30)]
    apply(world, handler, *facts)
    assert levels() == {"T1": 30, "T2": 20}
    for fact in facts:  # the batch again, as after a crash; the state never goes back, not even for a moment
        apply(world, handler, fact)
        assert levels() == {"T1": 30, "T2": 20}
    assert applied == [1, 2, 3], "the same fact and older ones are skipped"
    apply(world, handler, level(4, "T1", 40))
    assert levels() == {"T1": 40, "T2": 20}


@pytest.mark.req("BC-08")
def test_a_batch_that_comes_again_ends_in_the_same_state(
    world: BoundaryWorld, latest: LatestPerKey, levels: Callable[[], dict[str, int]]
) -> None:
    for number, (tank, height) in enumerate([("T1", 1), ("T1", 2), ("T2", 3)]):
        envelope = Envelope(
            message_id=f"level-{number}", from_zone="a", to_zone="b", produced_at_unix_ms=10 - number
        )
        world.admin.append(envelope, fact_of(f"tank:{tank}", "measured", {"tank": tank, "level": height}))
    losing_confirms(world, latest(world.handler(set_level)), times=2)
    assert levels() == {"T1": 2, "T2": 3}, "newer means a higher offset, whatever the producers' clocks say"


@pytest.mark.req("BC-08")
def test_subject_predicate_business_key_and_consumer_make_the_key_and_are_not_mixed_up(
    world: BoundaryWorld, latest: LatestPerKey
) -> None:
    applied: list[int] = []

    async def note(fact: Any, session: Awaited) -> None:
        applied.append(fact.offset)

    handler = latest(world.handler(note))
    apply(world, handler, level(9, "a", 0, subject="tank:x_a", predicate="b"))
    apply(world, handler, level(1, "a", 0, subject="tank:x", predicate="a_b"))
    apply(world, handler, level(2, "a", 0, subject="tank:x_a", predicate="a_b"))
    apply(world, handler, level(3, "b", 0, subject="tank:x_a", predicate="b"))
    another = LatestPerKey("another", key=lambda fact: fact.fact.object["tank"])
    apply(world, another(world.handler(note)), level(4, "a", 0, subject="tank:x_a", predicate="b"))
    assert applied == [9, 1, 2, 3, 4], "five different keys"
    apply(world, handler, level(8, "a", 0, subject="tank:x_a", predicate="b"))
    assert applied == [9, 1, 2, 3, 4]


@pytest.mark.req("BC-08")
def test_the_offset_is_kept_in_the_transaction_of_the_outcome(
    world: BoundaryWorld, latest: LatestPerKey, levels: Callable[[], dict[str, int]]
) -> None:
    async def fail(fact: Any, session: Awaited) -> None:
        await set_level(fact, session)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        apply(world, latest(world.handler(fail)), level(5, "T1", 50))
    apply(world, latest(world.handler(set_level)), level(4, "T1", 40))
    assert levels() == {"T1": 40}


def test_a_business_key_that_is_none_is_an_error_that_names_the_fact(
    world: BoundaryWorld, latest: LatestPerKey
) -> None:
    for key in (None, 1.5, "", True, ["T1"]):
        bad = LatestPerKey(NAME, key=lambda fact, key=key: key)
        with pytest.raises(TypeError, match="business key of fact message-1"):
            apply(world, bad(world.handler(set_level)), level(1, "T1", 1))


# ── 3: an outcome that is naturally idempotent ──────────────────────────────────────────────────────────


def set_up(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE levels (tank VARCHAR(20) PRIMARY KEY, level INTEGER)"))
        connection.execute(text("CREATE TABLE effects (number INTEGER, at_offset BIGINT)"))


SAMPLES = [
    level(1, "T1", 10),
    level(2, "T2", 20),
    level(3, "T1", 30),
]


def of_mode(database: Database, work: Any) -> Any:
    """`async def work` as a handler, without a world."""

    def handle(fact: Any, session: Any) -> Any:
        return run_blocking(work(fact, Awaited(session)))

    async def handle_async(fact: Any, session: Any) -> Any:
        return await work(fact, Awaited(session))

    return handle_async if database.asynchronous else handle


def check(database: Database, handler: Any) -> None:
    place = None if database.is_sqlite else database.url
    check_idempotent_outcome(handler, SAMPLES, setup=set_up, database=place)


@pytest.mark.req("BC-09")
def test_a_declared_outcome_may_be_applied_again_and_its_claim_is_checked(database: Database) -> None:
    handler = idempotent_outcome("sets the level of a tank")(of_mode(database, set_level))
    check(database, handler)


async def add_up(fact: Any, session: Awaited) -> None:
    value = fact.fact.object
    await session.execute(
        "INSERT INTO levels (tank, level) VALUES (:tank, :level) ON CONFLICT (tank) "
        "DO UPDATE SET level = levels.level + excluded.level",
        {"tank": value["tank"], "level": value["level"]},
    )


async def write_down(fact: Any, session: Awaited) -> None:
    await session.execute(
        "INSERT INTO effects (number) VALUES (:level)", {"level": fact.fact.object["level"]}
    )


async def write_changes_down(fact: Any, session: Awaited) -> None:
    """Nothing changes if a fact comes twice in a row; but if all come again, everything changes again."""
    value = fact.fact.object
    there = await session.execute_scalar(
        "SELECT level FROM levels WHERE tank = :tank", {"tank": value["tank"]}
    )
    if there != value["level"]:
        await set_level(fact, session)
        await write_down(fact, session)


@pytest.mark.req("BC-09")
@pytest.mark.parametrize(
    ("work", "reported"),
    [
        (add_up, "levels: 2 rows too many"),
        (write_down, "effects: 6 rows too many"),
        (write_changes_down, "effects: 2 rows too many"),
    ],
)
def test_a_false_claim_is_found_out_and_the_rows_that_differ_are_reported(
    database: Database, work: Any, reported: str
) -> None:
    handler = idempotent_outcome("it is the same every time, they said")(of_mode(database, work))
    with pytest.raises(AssertionError) as caught:
        check(database, handler)
    assert reported in str(caught.value)
    assert "they said" in str(caught.value)


@pytest.mark.req("BC-09")
def test_a_declared_outcome_is_the_same_after_a_batch_came_again(world: BoundaryWorld) -> None:
    world.database.do("CREATE TABLE levels (tank VARCHAR(20) PRIMARY KEY, level INTEGER)")
    for number, height in enumerate((1, 2)):
        envelope = Envelope(message_id=f"level-{number}", from_zone="a", to_zone="b", produced_at_unix_ms=1)
        world.admin.append(envelope, fact_of("tank:T1", "measured", {"tank": "T1", "level": height}))
    handler = idempotent_outcome("sets the level of a tank")(world.handler(set_level))
    losing_confirms(world, handler, times=2)
    assert world.database.scalar("SELECT level FROM levels") == 2


def test_without_a_claim_or_without_samples_there_is_nothing_to_check() -> None:
    def handler(fact: Any, session: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="idempotent_outcome"):
        check_idempotent_outcome(handler, SAMPLES, setup=set_up)
    with pytest.raises(ConfigurationError, match="sample facts"):
        check_idempotent_outcome(idempotent_outcome("nothing happens")(handler), [], setup=set_up)
    with pytest.raises(ConfigurationError, match="sentence"):
        idempotent_outcome(" ")


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda: OncePerId(""), "pass the name"),
        (lambda: LatestPerKey("", key=lambda _: 1), "pass the name"),
        (lambda: OncePerId(NAME, keep_days=0), "keep_days"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused(make: Callable[[], object], reported: str) -> None:
    with pytest.raises(ConfigurationError, match=reported):
        make()
