"""The form of the dashboard that asks the leader of a domain to resign."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from riverpy._dashboard.change import ChangeRoute, ConfirmationQuestion, RequestedChange, log_change
from riverpy._dashboard.database import acquire_connection
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.messages import FlashMessage
from riverpy._dashboard.paths import quote_name_for_sentence
from riverpy._names import DEFAULT_DOMAIN, domain_lease_name, validate_domain_name
from riverpy._postgres.leaders import leader_request_resign
from riverpy._postgres.leases import lease_request_resign
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import QueryParams

    from riverpy._dashboard.access import Access
    from riverpy._dashboard.site import Site


def parse_resign_form(_path_params: Mapping[str, Any], fields: QueryParams) -> RequestedChange:
    """Parse a form that asks the leader of a domain to resign. Return the requested change.

    Raises:
        PageError: the form does not come from this dashboard.
    """
    domain = fields.get("domain", "")
    try:
        validate_domain_name(domain)
    except ConfigError:
        raise PageError(
            400, "The form names no domain.", "Go back, and use one of the buttons."
        ) from None
    return RequestedChange(partial(request_resign, domain), partial(_make_resign_question, domain))


async def _make_resign_question(domain: str, site: Site) -> ConfirmationQuestion:
    """Return the question that the user must confirm. Raise PageError if the domain does not
    exist."""
    status = await site.statuses.read()
    if domain != DEFAULT_DOMAIN and all(one.name != domain for one in status.domains):
        raise PageError(
            404,
            f"There is no domain {quote_name_for_sentence(domain)}.",
            "The page Leader lists all domains that have workers, queues or a leader.",
        )
    return ConfirmationQuestion(
        f"Let the leader of {domain} resign?",
        "Another candidate becomes leader, at the latest within seconds. If there is no other one, "
        "the same client becomes leader again. Running jobs go on.",
        keep_text="Keep the leader",
    )


async def request_resign(domain: str, site: Site, access: Access) -> FlashMessage:
    """Ask the leader of a domain to resign, log this, and return the message for the user."""
    schema = site.client.config.schema
    async with acquire_connection(site.client) as connection:
        if domain == DEFAULT_DOMAIN:
            await leader_request_resign(connection, schema)
        else:
            name = domain_lease_name(domain)
            await lease_request_resign(connection, schema, name=name)
    log_change(access, "resign leader", domain)
    return FlashMessage(
        f"The leader of {domain} was asked to resign. A leader that only polls does not receive it."
    )


CHANGE_ROUTE = ChangeRoute("/leader/resign", parse_resign_form, "/leader")
