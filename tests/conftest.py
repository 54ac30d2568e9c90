"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A slow or busy machine makes an example slow, not wrong.
settings.register_profile("amptune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("amptune")
