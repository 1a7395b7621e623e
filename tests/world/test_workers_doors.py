"""What is meant for the host of Workers alone, asked by somebody else."""

from __future__ import annotations

import httpx
import pytest

from deploy.launcher import LocalWorld

pytestmark = [pytest.mark.world]


def test_the_admin_interface_wants_its_secret(world: LocalWorld) -> None:
    admin = world.world.topology.edge("ams").admin
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-skerry-secret": "x"}):
        answer = httpx.get(f"http://{admin}/admin/v1/workers", headers=headers, trust_env=False)
        assert answer.status_code == 401
    public = httpx.get(f"{world.edges['ams']}/admin/v1/workers", trust_env=False)
    assert public.status_code == 404


def test_a_caller_cannot_pass_for_a_worker(world: LocalWorld) -> None:
    body = {"model": "tiny", "prompt": "x"}
    answer = httpx.post(
        f"{world.edges['ams']}/v1/completions",
        json=body,
        headers={"x-skerry-worker": "guess"},
        trust_env=False,
    )
    assert answer.status_code == 401
