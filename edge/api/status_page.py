"""`GET /status` and `GET /v1/models`: what an edge knows of the world, as plain data."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from core.config import Edge, Topology
from core.public_tls import PublicCertificate
from core.status import RegionStatus, as_json
from core.types import ModelName
from edge.admission import Admission
from edge.api.openai import unknown_model
from edge.api.openai_types import ModelList, ModelOut
from edge.crew.chorus import WorkerPage
from edge.routing.regions import Regions
from edge.tenants.door import Caller


class RegionPage(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: fresh, suspect (silent for three seconds or cut) or unknown (never heard).

    `work_s` is what the load bound compares; `weight` is its share of the ring, the
    topology's or what `skerry weight` ordered; `status` is what the region said last, spelled out.
    """

    name: str
    state: str
    draining: bool
    age_s: float | None
    round_trip_ms: float
    work_s: float
    weight: int
    status: msgspec.Raw | None


class FrontPage(msgspec.Struct, frozen=True, kw_only=True):
    """For a program that asks the edge's bare address; browsers get the page."""

    api: str = "/v1"
    models: str = "/v1/models"
    status: str = "/status"
    openapi: str = "/openapi.json"


class StatusPage(msgspec.Struct, frozen=True, kw_only=True):
    edge: str
    place: str
    version: str
    uptime_s: float
    draining: bool
    in_flight: int
    held: int
    """Waiting here while every region is busy."""
    certificate_left_s: float | None
    """Until the certificate that callers are shown ends; null where they speak plaintext."""
    workers: list[WorkerPage]
    models: list[ModelOut]
    regions: list[RegionPage]


class Outlook:
    """The pages' view of topology and regions. `created`: Unix seconds of the edge's start."""

    def __init__(
        self,
        topology: Topology,
        edge: Edge,
        regions: Regions,
        admission: Admission,
        created: int,
        public: PublicCertificate | None = None,
    ) -> None:
        self._topology = topology
        self._edge = edge
        self._regions = regions
        self._admission = admission
        self._created = created
        self._public = public

    def ready(self) -> bool:
        """Whether at least one region can answer now."""
        return not self._admission.draining and any(
            region.fresh and not region.draining and region.status and region.status.models
            for region in self._regions.view()
        )

    @property
    def unready(self) -> str:
        """Why it is not ready, where it is not."""
        return self._admission.closed or "no region can answer"

    def statuses(self) -> Iterable[RegionStatus]:
        """Of the regions that are heard."""
        return self._regions.fresh_statuses()

    def models(self, caller: Caller | None = None) -> ModelList:
        """All, or those that `caller` may ask."""
        names = [ModelName(name) for name in self._topology.models]
        asked = [name for name in names if caller is None or caller.may_ask(name)]
        return ModelList(data=[self._model(name) for name in asked])

    def model(self, name: str, caller: Caller) -> ModelOut:
        """By name or alias; the answer carries the name that was asked for."""
        canonical = self._topology.canonical_model(name)
        if canonical is None or not caller.may_ask(canonical):
            raise unknown_model(self._topology, name)
        return msgspec.structs.replace(self._model(canonical), id=name)

    def status(self, *, version: str, uptime_s: float, workers: list[WorkerPage]) -> StatusPage:
        return StatusPage(
            edge=self._edge.name,
            place=self._edge.place,
            version=version,
            uptime_s=uptime_s,
            draining=self._admission.draining,
            in_flight=sum(worker.in_flight for worker in workers),
            held=sum(worker.held for worker in workers),
            certificate_left_s=None if self._public is None else self._public.left_s,
            workers=workers,
            models=self.models().data,
            regions=[
                RegionPage(
                    name=region.name,
                    state="fresh" if region.fresh else "suspect" if region.status else "unknown",
                    draining=region.draining,
                    age_s=region.age_s,
                    round_trip_ms=region.round_trip_s * 1000,
                    work_s=region.work_s,
                    weight=region.weight,
                    status=msgspec.Raw(as_json(region.status)) if region.status else None,
                )
                for region in self._regions.view()
            ],
        )

    def _model(self, name: ModelName) -> ModelOut:
        model = self._topology.models[name]
        serving = [
            served
            for status in self._regions.fresh_statuses()
            if not status.draining
            for served in status.models
            if served.name == name
        ]
        contexts = [served.context for served in serving]
        return ModelOut(
            id=name,
            created=self._created,
            context_length=min(contexts) if contexts else model.context,
            aliases=list(model.aliases),
            ready=bool(serving),
        )
