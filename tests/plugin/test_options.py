"""Options: the command line wins over the ini file, and a wrong value ends the run with what is valid."""

import pytest

SHOW = """
    def test_show(request):
        from pytest_park.options import park_options
        options = park_options(request.config)
        print("memory", options.fake_memory, "count", options.fake_count, "real", options.real_gpu)
"""


def test_without_options_there_is_one_fake_card_of_12_gib(pytester):
    pytester.makepyfile(SHOW)
    pytester.runpytest("-s").stdout.fnmatch_lines([f"*memory {12 * 1024**3} count 1 real False*"])


def test_the_ini_file_changes_the_fake_card(pytester):
    pytester.makeini("[pytest]\npark_fake_memory = 64 MiB\npark_fake_count = 2\n")
    pytester.makepyfile(SHOW)
    pytester.runpytest("-s").stdout.fnmatch_lines([f"*memory {64 * 1024**2} count 2 real False*"])


def test_the_command_line_wins_over_the_ini_file(pytester):
    pytester.makeini("[pytest]\npark_fake_memory = 64 MiB\npark_fake_count = 2\n")
    pytester.makepyfile(SHOW)
    result = pytester.runpytest("-s", "--park-fake-memory=1 GiB", "--park-fake-count=3")
    result.stdout.fnmatch_lines([f"*memory {1024**3} count 3 real False*"])


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--park-fake-memory=12 gigs", "*--park-fake-memory: '12 gigs' is not a size:*GiB*"),
        ("--park-fake-memory=12 GB", "*such as '12 GiB'. GB is not one of them: did you mean GiB[?]"),
        ("--park-fake-memory=0", "*without memory*"),
        ("--park-fake-count=two", "*--park-fake-count: 'two' is not a number of devices*1 to*"),
        ("--park-fake-count=0", "*--park-fake-count: 0 is not a number of devices*"),
        ("--park-fake-count=1000", "*--park-fake-count: 1000 is not a number of devices*"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_says_what_is_valid(pytester, option, says):
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("park_fake_memory = a lot", "*park_fake_memory in the ini file: 'a lot' is not a size*"),
        ("park_fake_memory =", "*park_fake_memory in the ini file: '' is not a size*"),
        ("park_fake_count = two", "*park_fake_count in the ini file: 'two' is not a number of devices*"),
        ("park_fake_count = 0", "*park_fake_count in the ini file: 0 is not a number of devices*"),
    ],
)
def test_a_wrong_ini_value_is_named_as_such(pytester, line, says):
    pytester.makeini(f"[pytest]\n{line}\n")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])


def test_the_help_lists_options_and_ini_values(pytester):
    result = pytester.runpytest("--help")
    result.stdout.fnmatch_lines(["*--real-gpu*", "*--park-fake-memory=SIZE*", "*--park-fake-count=N*"])
    result.stdout.fnmatch_lines(["*park_fake_memory (string):*", "*park_fake_count (string):*"])


def test_the_header_tells_the_fake_card_where_one_was_asked_for(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest("--park-fake-memory=1536 MiB")
    result.stdout.fnmatch_lines(["park: 1 fake device, 1.50 GiB"])


def test_a_run_that_does_not_mention_us_has_no_line_of_ours(pytester):
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest()
    result.stdout.no_fnmatch_line("park:*")
    result.stdout.no_fnmatch_line("*= park =*")
