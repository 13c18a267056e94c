"""A parameter gets a service or a session whatever is around its type: `| None`, `Annotated`, an alias."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NewType, Optional

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import TypeAliasType

from onceward import Onceward, Transaction, testing
from onceward.errors import ConfigurationError
from tests.support.orm_shop import contract


class Client: ...


class Price: ...


Alias = TypeAliasType("Alias", Annotated[Session, "Depends"])
Named = NewType("Named", Session)
HINTS = [Optional[Session], Session | None, Alias, Named, Annotated[Alias | None, "more"]]  # noqa: UP045


@pytest.mark.req("CC-065")
def test_a_service_that_may_be_none_is_given() -> None:
    app = Onceward("shop")
    got: list[Any] = []

    @app.service
    def client() -> Client:
        return Client()

    @app.service
    def price(client: Client | None = None) -> Price:
        got.append(client)
        return Price()

    @app.consumer("memory://optional", contract=None)
    def take(
        payload: dict[str, Any] | None,
        by_type: Client | None = None,
        price: Price | None = None,
        transaction: Transaction | None = None,
        other: str | None = None,
    ) -> None:
        got.extend([by_type, price, transaction, other])

    with testing.app(app) as t:
        t.send(take, {})
        assert t.drain().succeeded == 1
    assert [type(each) for each in got] == [Client, Client, Price, Transaction, type(None)]


@pytest.mark.req("IN-01")
@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_a_session_is_given_whatever_is_around_its_type(hint: Any, tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")
    got: list[Any] = []

    def take(payload: dict[str, Any], db: Any = None) -> None:
        got.append(db)

    take.__annotations__["db"] = hint
    app.consumer("memory://hints", contract=contract())(take)
    with testing.app(app) as t:
        t.send(take, {})
        assert t.drain().succeeded == 1
    assert isinstance(got[0], Session)


class Tenants(Session):
    def __init__(self, tenant: str) -> None:
        super().__init__()


class Passing(Session):
    def __init__(self, tenant: str = "none", **more: Any) -> None:
        super().__init__(**more)


class AsyncTenants(AsyncSession):
    sync_session_class = Tenants


@pytest.mark.req("IN-06")
def test_a_class_of_sessions_that_the_inbox_cannot_make_is_refused(tmp_path: Path) -> None:
    app = Onceward("shop", database=f"sqlite:///{tmp_path}/shop.db")

    def plain(payload: dict[str, Any], db: Tenants) -> None: ...
    async def in_asyncio(payload: dict[str, Any], db: AsyncTenants) -> None: ...
    def passing(payload: dict[str, Any], db: Passing) -> None: ...

    for each in (plain, in_asyncio):
        with pytest.raises(ConfigurationError, match=r"cannot make it: .*Tenants\(join_transaction_mode"):
            app.consumer("memory://tenants", contract=contract())(each)
    app.consumer("memory://tenants", contract=contract())(passing)
