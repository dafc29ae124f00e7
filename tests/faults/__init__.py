"""Tests of riverpy under load during faults: no job is lost or finished twice, no worker has to be
restarted, and the log describes the fault in plain words."""

from __future__ import annotations
