from maitred.core.tenancy import KeySecret
from maitred.identity.keys import hash_secret, make_key, matches, parse


def test_a_new_key_parses_into_what_is_kept_of_it():
    made = make_key()
    parsed = parse(made.plaintext)
    assert parsed is not None
    public_id, secret = parsed
    assert public_id == made.public_id
    assert len(public_id) == 16
    assert len(secret) == 43
    assert made.secret == KeySecret(hash_secret(secret))
    assert secret not in f"{made} {made!r}"


def test_keys_differ_also_under_one_id():
    first = make_key()
    second = make_key(first.public_id, expires_s=5.0)
    assert second.public_id == first.public_id
    assert second.plaintext != first.plaintext
    assert second.secret.sha256 != first.secret.sha256
    assert second.secret.expires_s == 5.0
    assert make_key().public_id != first.public_id


def test_the_secret_must_be_exactly_the_one_kept():
    made = make_key()
    _, secret = parse(made.plaintext)
    assert matches(secret, [made.secret], now_s=0.0)
    assert not matches(secret[:-1] + ("A" if secret[-1] != "A" else "B"), [made.secret], now_s=0.0)
    assert not matches(secret, [], now_s=0.0)


def test_while_a_key_is_rotated_both_secrets_are_good_until_the_old_one_ends():
    old = make_key(expires_s=100.0)
    new = make_key(old.public_id)
    kept = [old.secret, new.secret]
    _, old_secret = parse(old.plaintext)
    _, new_secret = parse(new.plaintext)
    assert matches(old_secret, kept, now_s=99.9)
    assert not matches(old_secret, kept, now_s=100.0)
    assert matches(new_secret, kept, now_s=100.0)
    third = make_key(old.public_id)
    assert matches(parse(third.plaintext)[1], [*kept, third.secret], now_s=0.0)


def test_only_the_whole_form_is_a_key():
    plaintext = make_key().plaintext
    for wrong in (
        "",
        "none",
        "sk-mtd-",
        plaintext[:-1],
        plaintext + "\n",
        plaintext[:-1] + "\n",
        plaintext[:-1] + "=",
        plaintext[:-1] + "é",
        plaintext.upper(),
        plaintext.replace("sk-mtd-", "sk_mtd_"),
        plaintext[:7] + "A" + plaintext[8:],
        plaintext[:7] + "-" + plaintext[8:],
        plaintext[:7] + "٣" + plaintext[8:],  # a digit, though none of ours
        "x" * 1_000_000,
        plaintext + "\0" * 1_000_000,
    ):
        assert parse(wrong) is None, wrong[:80]
