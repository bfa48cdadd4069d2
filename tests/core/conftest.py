"""A service with real processes, for what is said about elements that leave one."""

from tests.service.conftest import one_worker as one_worker
