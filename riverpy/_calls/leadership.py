"""LeadershipMethods: the method of a client that requests a new leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._calls.base import ClientMethods
from riverpy._names import DEFAULT_DOMAIN, domain_lease_name
from riverpy._postgres.leaders import leader_request_resign
from riverpy._postgres.leases import lease_request_resign

if TYPE_CHECKING:
    from riverpy._postgres.sessions.protocols import CallerTransaction


class LeadershipMethods(ClientMethods):
    """The method of a client that requests a new leader."""

    async def request_resign(self, *, tx: CallerTransaction | None = None) -> None:
        """Request that the leader of this client's leader domain resigns, so that another client
        becomes leader. Leaders in Go receive the request too.

        The leader is notified when the transaction commits. If there is no leader, the request has
        no effect. A leader that receives no notifications, for example because of `poll_only`, does
        not receive the request. The former leader may become leader again if no other client takes
        part in leader election.

        Args:
            tx: as for `insert`.

        Raises:
            TransactionError: `tx` is closed, aborted or not in a transaction.
            SchemaMissingError: the database has no tables of River, or the client has a
                `leader_domain` and the tables of domains are missing.
            ClientStateError: there is no `tx`, and the client is not open.
        """
        async with self._transaction(tx) as connection:
            if self._config.domain == DEFAULT_DOMAIN:
                await leader_request_resign(connection, self._config.schema)
            else:
                name = domain_lease_name(self._config.domain)
                await lease_request_resign(connection, self._config.schema, name=name)
