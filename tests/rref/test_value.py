"""Values on their owner: threads that wait for one that will never be made."""

from __future__ import annotations

import threading

import pytest

from remora import rpc
from remora.errors import NotInitialized
from tests.agent.alone import wait_until, worker_alone


def test_the_end_of_the_worker_ends_waits_for_values_that_are_being_made() -> None:
    with worker_alone(graceful=False):
        table = rpc._get_current_rpc_agent().references.table
        value = table.owned.received_by_owner(table.state.new_id(), table.state.me)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                value.get()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: value._waiters)
        rpc.shutdown(graceful=False)
        thread.join(10.0)
        assert not thread.is_alive()
        assert [type(error) for error in errors] == [NotInitialized]
        with pytest.raises(NotInitialized, match="no longer running"):
            table.owned.received_by_owner(table.state.new_id(), table.state.me).get()
