"""What is shown of an address never has its password or its token."""

import pytest

from phalanx.core.secrets import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("data.path 'https://u:hunter2@h/x' is", "data.path 'https://u:***@h/x' is"),
        ("s3://b/x?X-Amz-Signature=hunter2&a=1", "s3://b/x?X-Amz-Signature=***&a=1"),
        ("https://h/x?access_token=hunter2", "https://h/x?access_token=***"),
        ("https://:hunter2@h", "https://:***@h"),
        ("recipe.key=3 is no address", "recipe.key=3 is no address"),
        ("http://[::1]:8000/a@b", "http://[::1]:8000/a@b"),
    ],
)
def test_secrets_of_addresses_are_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert "hunter2" not in redact(text)
