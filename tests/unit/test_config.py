from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongd.config import (
    OPTIONS,
    SECTIONS,
    Config,
    config_file,
    dump_toml,
    merge,
    parse_size,
    parse_toml,
    problems,
)
from loongd.errors import ConfigError

ROOT = Path(__file__).parents[2]


def complaint(
    file: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    cli: dict[str, Any] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        merge(file or {}, env or {}, cli or {}, file_name="etc/loongd.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_shipped_file_is_the_dump_of_the_defaults() -> None:
    shipped = (ROOT / "etc" / "loongd.toml").read_text()
    assert shipped == dump_toml(Config())
    assert merge(parse_toml(shipped, file_name="f"), {}, {}) == Config()


def test_a_batch_of_short_prompts_must_fit_a_step() -> None:
    message = complaint({"max_num_batched_tokens": 4096, "max_step_tokens": 2048})
    assert "4096" in message
    assert "2048 new tokens in a step (max_step_tokens)" in message


def test_the_file_names_every_option() -> None:
    lines = dump_toml(Config()).splitlines()
    for name in Config.__struct_fields__:
        assert any(line.startswith((f"{name} = ", f"# {name} =")) for line in lines), name


def test_every_option_has_help_and_sections_name_fields() -> None:
    assert set(OPTIONS) == set(Config.__struct_fields__)
    assert all(option.help.endswith(".") for option in OPTIONS.values())
    assert set(SECTIONS) <= set(OPTIONS)
    assert next(iter(OPTIONS)) in SECTIONS


def test_command_line_wins_over_environment_over_file_over_default() -> None:
    file = {"port": 1, "seed": 1, "host": "file"}
    env = {"LOONGD_PORT": "2", "LOONGD_SEED": "2", "HOME": "/root"}
    config = merge(file, env, {"port": "3"})
    assert (config.port, config.seed, config.host) == (3, 2, "file")
    assert config.max_num_seqs == Config().max_num_seqs


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("128k", 128_000),
        ("128K", 131_072),
        ("1m", 1_000_000),
        ("1M", 1_048_576),
        ("2g", 2 * 10**9),
        ("2G", 2 << 30),
        ("1.5k", 1_500),
        ("500_000", 500_000),
        ("7", 7),
    ],
)
def test_sizes_follow_the_rule_of_vllm(text: str, number: int) -> None:
    assert parse_size(text) == number
    assert merge({"max_model_len": text}, {}, {}).max_model_len == number
    assert merge({}, {"LOONGD_KV_POOL_TOKENS": text}, {}).kv_pool_tokens == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1.0005k", "1kk", "1e3", "0x10", "1 k"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


def test_texts_become_the_type_of_the_field() -> None:
    env = {
        "LOONGD_API_KEY": "one, two,",
        "LOONGD_ENABLE_LOG_REQUESTS": "off",
        "LOONGD_SHUTDOWN_TIMEOUT": "2.5",
        "LOONGD_INSTANCES": "null",
    }
    config = merge({"instances": 4}, env, {})
    assert config.api_key == ["one", "two"]
    assert config.enable_log_requests is False
    assert config.shutdown_timeout == 2.5
    assert config.instances is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            {"env": {"LOONGD_PORT": "x"}},
            "environment LOONGD_PORT='x': expected a whole number from 0 to 65535",
        ),
        ({"cli": {"port": "70000"}}, "--port '70000': expected a whole number from 0 to 65535"),
        (
            {"file": {"instances": 0}},
            "etc/loongd.toml: instances = 0: expected a whole number of at least 1",
        ),
        (
            {"file": {"port": True}},
            "etc/loongd.toml: port = True: expected a whole number from 0 to 65535",
        ),
        ({"file": {"model": 3}}, "etc/loongd.toml: model = 3: expected a text"),
        (
            {"cli": {"dtype": "bf16"}},
            "--dtype 'bf16': expected auto, float32, bfloat16 or float16",
        ),
        (
            {"cli": {"gpu_memory_utilization": "nan"}},
            "--gpu-memory-utilization 'nan': expected a number above 0 and at most 1",
        ),
        (
            {"cli": {"shutdown_timeout": "inf"}},
            "--shutdown-timeout 'inf': expected a number of at least 0, and finite",
        ),
        (
            {"env": {"LOONGD_ENABLE_LOG_REQUESTS": "maybe"}},
            "environment LOONGD_ENABLE_LOG_REQUESTS='maybe': expected true or false",
        ),
        (
            {"file": {"prot": 1}},
            "etc/loongd.toml: unknown key 'prot' (did you mean 'port'?)",
        ),
        (
            {"env": {"LOONGD_PROT": "1"}},
            "environment: unknown variable LOONGD_PROT (did you mean 'LOONGD_PORT'?)",
        ),
        ({"env": {"LOONGD_ZZZ": ""}}, "environment: unknown variable LOONGD_ZZZ"),
        (
            {"file": {"server": {"port": 1}}},
            "etc/loongd.toml: [server]: no tables: keys go at the top level",
        ),
        (
            {"file": {"model": {"path": "m"}}},
            "etc/loongd.toml: [model]: no tables: keys go at the top level",
        ),
    ],
)
def test_an_error_names_source_key_and_value(layers: dict[str, Any], message: str) -> None:
    assert complaint(**layers) == message


def test_all_that_is_wrong_is_told_at_once() -> None:
    file = {"prot": 1, "port": 70_000, "seed": 5, "server": {"host": "x"}}
    env = {"LOONGD_PORT": "x", "LOONGD_SEED": "6", "LOONGD_ZZZ": ""}
    assert problems(file, env, file_name="f") == [
        "f: unknown key 'prot' (did you mean 'port'?)",
        "f: port = 70000: expected a whole number from 0 to 65535",
        "f: [server]: no tables: keys go at the top level",
        "environment LOONGD_PORT='x': expected a whole number from 0 to 65535",
        "environment: unknown variable LOONGD_ZZZ",
    ]
    assert problems({"port": 1}, {"LOONGD_SEED": "6"}) == []


def test_a_broken_lower_layer_is_not_hidden_by_a_higher_one() -> None:
    assert "LOONGD_PORT" in complaint(env={"LOONGD_PORT": "x"}, cli={"port": "1"})


def test_variables_of_loongd_that_are_no_options_pass() -> None:
    env = {"LOONGD_CONFIG": "f", "LOONGD_ADMIN_SOCKET": "s", "LOONGD_TEST_MODEL": "m"}
    assert merge({}, env, {}) == Config()


@pytest.mark.parametrize(
    ("cli", "part"),
    [
        ({"host": ""}, "host is empty"),
        ({"api_key": ["good", " "]}, "api_key holds an empty key"),
        (
            {"instances": 2, "kv_pool_tokens": 1000, "max_model_len": 2001},
            "max_model_len is 2001 tokens, but the pool holds only 2000",
        ),
    ],
)
def test_options_that_contradict_are_refused(cli: dict[str, Any], part: str) -> None:
    assert part in complaint(cli=cli)


def test_a_length_that_fills_the_pool_exactly_is_accepted() -> None:
    merge({}, {}, {"instances": 2, "kv_pool_tokens": 1000, "max_model_len": 2000})


def test_a_syntax_error_names_the_file_and_the_line() -> None:
    with pytest.raises(ConfigError, match=r"^f\.toml: not valid TOML: .*line 2"):
        parse_toml("port = 1\nhost = \n", file_name="f.toml")


def test_which_file_is_read() -> None:
    assert config_file({}, None) == ("/etc/loongd/loongd.toml", False)
    assert config_file({"LOONGD_CONFIG": "a"}, None) == ("a", True)
    assert config_file({"LOONGD_CONFIG": "a"}, "b") == ("b", True)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        Config,
        model=TEXTS,
        chat_template=st.none() | TEXTS,
        api_key=st.lists(TEXTS.filter(str.strip)),
        port=st.integers(0, 65535),
        seed=st.integers(-(2**63), 2**63 - 1),
        sse_keep_alive_interval=st.floats(0, allow_infinity=False),
        enable_log_requests=st.booleans(),
    )
)
def test_a_dump_parses_back(config: Config) -> None:
    assert merge(parse_toml(dump_toml(config), file_name="f"), {}, {}) == config
