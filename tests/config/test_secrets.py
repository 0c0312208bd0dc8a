"""Detection of secret names, and redaction of texts."""

import pytest

from megalite.config.describe import is_secret_name, redact_text, redacted, replace, settings, without_credentials
from megalite.config.run import RunConfig


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AZURE_CLIENT_SECRET", "DB_PASSWORD"),
        *("hf-token", "clientSecret", "apiKey", "api_key", "GOOGLE_APPLICATION_CREDENTIALS", "key", "token"),
    ],
)
def test_secret_names_are_detected(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["tokenizer_model", "tokens_per_second", "eod_token_id", "keys", "keep_latest", "monkey", "", "3"]
)
def test_similar_names_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_no_setting_counts_as_secret() -> None:
    """No setting is a secret: there is no flag for a key or a token."""
    assert [name for name in settings() if is_secret_name(name)] == []


@pytest.mark.parametrize(
    "text, left",
    [
        ("s3://me:hunter2@host/data", "s3://***@host/data"),
        ("see https://token@host/a and ssh://git:p@ss@host", "see https://***@host/a and ssh://***@host"),
        ("https:/me:hunter2@host/run", "https:/***@host/run"),
        ("https://host/x?token=abc&step=3", "https://host/x?token=***&step=3"),
        ("https://host/x?X-Amz-Signature=abc&sig=d", "https://host/x?X-Amz-Signature=***&sig=***"),
        ("WANDB_API_KEY=abc megalite", "WANDB_API_KEY=*** megalite"),
        ("hf-token='abc def' x", "hf-token=*** x"),
        ("/data/me@host/tokens=3/tokenizer.model", "/data/me@host/tokens=3/tokenizer.model"),
        ("https://host/@me", "https://host/@me"),
        ("/warehouse/key=7/part", "/warehouse/key=7/part"),
        ("runs/1", "runs/1"),
    ],
)
def test_texts_are_redacted(text: str, left: str) -> None:
    assert redact_text(text) == left


def test_nested_values_are_redacted() -> None:
    tree = {"API_KEY": "x", "data": ["s3://a:b@c", 3], "inner": {"token": "y", "tokens": "z"}, "key": 5, "none": None}
    assert redacted(tree) == {
        "API_KEY": "***",
        "data": ["s3://***@c", 3],
        "inner": {"token": "***", "tokens": "z"},
        "key": 5,
        "none": None,
    }


def test_redaction_keeps_the_rest_of_a_config() -> None:
    plain = replace(RunConfig(), run_dir="runs/1", data_path=["0.5", "a", "0.5", "b"], tokenizer_model="t.model")
    assert without_credentials(plain) == plain
    secret = replace(plain, data_path=["https://me:hunter2@host/a"])
    assert without_credentials(secret) == replace(plain, data_path=["https://***@host/a"])
