"""outcore.integrations: no library needs another one, and which metrics are logged."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from outcore import integrations
from outcore.errors import MissingPackageError
from outcore.report import Report


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package as if it had not been used yet."""
    for name in ("LightningCallback", "TransformersCallback"):
        monkeypatch.delitem(vars(integrations), name, raising=False)
    for name in ("lightning", "transformers"):
        monkeypatch.delitem(sys.modules, f"outcore.integrations.{name}", raising=False)
    return monkeypatch


def test_transformers_without_lightning(fresh: Any) -> None:
    pytest.importorskip("transformers")
    fresh.setitem(sys.modules, "lightning.pytorch", None)
    fresh.setitem(sys.modules, "pytorch_lightning", None)
    assert integrations.TransformersCallback(budget="1GiB").backend is None
    with pytest.raises(MissingPackageError, match="pip install lightning"):
        integrations.LightningCallback  # noqa: B018 - the access is what is tested


def test_lightning_without_transformers(fresh: Any) -> None:
    pytest.importorskip("lightning.pytorch")
    fresh.setitem(sys.modules, "transformers", None)
    assert integrations.LightningCallback(budget="1GiB").session is None
    with pytest.raises(MissingPackageError, match="pip install transformers"):
        integrations.TransformersCallback  # noqa: B018 - as above


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KerasCallback'"):
        integrations.KerasCallback  # noqa: B018 - as above
    assert set(integrations.__all__) <= set(dir(integrations))


def test_metrics_while_nothing_is_planned() -> None:
    report = Report("search", "profiling", 1 << 30, disk_bytes_written=7)
    assert integrations.metrics(report) == {"outcore/disk_bytes_written": 7}


def test_the_peak_is_measured_where_it_was() -> None:
    figures: dict[str, Any] = {"predicted_peak_bytes": 100, "offloaded_bytes": 60}
    report = Report("search", "planned", 1 << 30, **figures, stall_seconds=0.5)
    found = integrations.metrics(report)
    assert found["outcore/peak_bytes"] == 100
    assert found["outcore/offloaded_bytes"] == 60
    assert found["outcore/stall_seconds"] == 0.5
    report = Report("search", "planned", 1 << 30, **figures, measured_peak_bytes=90)
    assert integrations.metrics(report)["outcore/peak_bytes"] == 90
