from optimum_memopt.engines.torch_compat.allocation_history import Taken, taken


def entry(action: str, address: int, size: int) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size}


def test_what_is_taken_is_the_most_at_once_and_what_is_left():
    entries = [
        entry("alloc", 1, 100),
        entry("segment_alloc", 9, 2000),
        entry("alloc", 2, 50),
        entry("free_requested", 1, 100),
        entry("free_completed", 1, 100),
        entry("alloc", 1, 30),
    ]
    assert taken(entries, ()) == Taken(150, 80)


def test_memory_that_was_there_counts_only_where_it_was_given():
    freed = [entry("free_requested", 7, 40), entry("alloc", 8, 100), entry("free_requested", 6, 1000)]
    assert taken(freed, ()) == Taken(100, 100)
    assert taken(freed, {7}) == Taken(60, 60)


def test_an_error_of_the_allocator_has_no_address():
    assert taken([{"action": "oom", "size": 5, "device_free": 1}], ()) == Taken(0, 0)
