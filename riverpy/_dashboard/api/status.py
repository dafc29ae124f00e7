"""The endpoints of the dashboard's JSON API for job counts, names of kinds and queues, health and
features. The inputs and answers have the fields of River UI's API."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from riverpy._dashboard.api.endpoint import Endpoint, NoInput, SuccessAnswer
from riverpy._dashboard.database import open_read_transaction
from riverpy._postgres.job_search import job_list_kinds
from riverpy._postgres.transactions import read_server_time
from riverpy._tools.top.statements import read_queue_names
from riverpy._version import VERSION

if TYPE_CHECKING:
    from riverpy._dashboard.api.endpoint import ApiCall

NAMES_PER_ANSWER_MAX = 100
NAMES_SEARCHED_MAX = 1_000
"""The maximum number of names that `complete_name` reads to find matches."""


class KindOrQueueNameList(msgspec.Struct):
    """Names of kinds or queues, sorted."""

    data: list[str]


class StateCount(msgspec.Struct):
    """The number of jobs in a state."""

    accuracy: Annotated[
        Literal["exact", "lower_bound"],
        msgspec.Meta(description="`lower_bound`: counting ended at this number."),
    ]
    count: int
    observed_at: Annotated[
        datetime, msgspec.Meta(description="When the jobs were counted: at most seconds ago.")
    ]


class StateCounts(msgspec.Struct):
    """The number of jobs in each state."""

    available: StateCount
    cancelled: StateCount
    completed: StateCount
    discarded: StateCount
    pending: StateCount
    retryable: StateCount
    running: StateCount
    scheduled: StateCount


class RiverProFeatures(msgspec.Struct):
    """The features of River Pro. The API has none of them, so River UI does not show their
    pages."""

    dead_letter_jobs: bool = False
    durable_periodic_jobs: bool = False
    has_producer_table: bool = False
    has_sequence_table: bool = False
    producer_queries: bool = False
    workflow_queries: bool = False


class Features(msgspec.Struct):
    """The features of this API."""

    extensions: RiverProFeatures
    job_list_hide_args_by_default: Annotated[
        bool, msgspec.Meta(description="Whether the dashboard hides all args.")
    ]


class Version(msgspec.Struct):
    """The version of riverpy. Fields that only a program in Go can fill are empty."""

    version: str = f"riverpy {VERSION}"
    revision: str = ""
    time: str = ""
    modified: bool = False
    go_version: str = ""


class CompleteNameInput(msgspec.Struct):
    """The part of a name to complete, and the names to leave out."""

    facet: Literal["job_kind", "queue_name"]
    match: Annotated[str, msgspec.Meta(description="A part of the name, in any case.")] = ""
    after: Annotated[str, msgspec.Meta(description="Only names behind this one.")] = ""
    exclude: Annotated[
        list[str], msgspec.Meta(max_length=1_000, description="Names to leave out.")
    ] = []


class HealthCheckInput(msgspec.Struct):
    """The name of the health check."""

    name: Annotated[
        Literal["complete", "minimal"],
        msgspec.Meta(description="`complete`: the database answers. `minimal`: the API answers."),
    ]


async def complete_name(call: ApiCall, given: CompleteNameInput) -> KindOrQueueNameList:
    """Return the names of kinds or queues that contain the text in `match`."""
    schema, limit = call.site.client.config.schema, NAMES_SEARCHED_MAX
    async with open_read_transaction(call.site.client) as tx:
        if given.facet == "job_kind":
            names = await job_list_kinds(tx, schema, after=given.after, limit=limit)
        else:
            names = sorted(await read_queue_names(tx, schema, limit=limit))
    part, left_out = given.match.casefold(), set(given.exclude)
    found = [
        name
        for name in names
        if name > given.after and part in name.casefold() and name not in left_out
    ]
    return KindOrQueueNameList(found[:NAMES_PER_ANSWER_MAX])


async def count_states(call: ApiCall, _: NoInput) -> StateCounts:
    """Return the number of jobs in each state."""
    status = await call.site.statuses.read()
    return StateCounts(
        **{
            name: StateCount(
                "lower_bound" if status.totals[name] >= status.cap else "exact",
                status.totals[name],
                status.at,
            )
            for name in StateCounts.__struct_fields__
        }
    )


async def get_features(call: ApiCall, _: NoInput) -> Features:
    """Return the features of this API, from which River UI decides what it shows. The API has no
    features of River Pro. River UI hides job args if the dashboard hides them."""
    return Features(RiverProFeatures(), call.site.options.hide_args)


async def check_health(call: ApiCall, given: HealthCheckInput) -> SuccessAnswer:
    """Check whether the dashboard works. If it does not, the request fails with an error status."""
    if given.name == "complete":
        async with open_read_transaction(call.site.client) as tx:
            await read_server_time(tx)
    return SuccessAnswer()


async def get_version(_call: ApiCall, _: NoInput) -> Version:
    """Return the version of riverpy."""
    return Version()


ENDPOINTS: tuple[Endpoint[Any], ...] = (
    Endpoint(
        "GET",
        "/autocomplete",
        "Complete the name of a kind or a queue",
        CompleteNameInput,
        KindOrQueueNameList,
        complete_name,
    ),
    Endpoint("GET", "/features", "Read what this API has", NoInput, Features, get_features),
    Endpoint(
        "GET",
        "/health-checks/{name}",
        "Check whether the dashboard works",
        HealthCheckInput,
        SuccessAnswer,
        check_health,
        {503: "The database does not answer."},
    ),
    Endpoint("GET", "/states", "Count jobs by state", NoInput, StateCounts, count_states),
    Endpoint("GET", "/version", "Read the version of riverpy", NoInput, Version, get_version),
)
