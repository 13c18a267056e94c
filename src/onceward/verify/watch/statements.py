"""Whether an SQL statement only reads: judged by its words, so anything unknown counts as a write."""

from __future__ import annotations

import re

_NOISE = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\$(\w*)\$.*?\$\1\$",
    re.DOTALL,
)
"""Comments and texts, which may contain any words."""
_HARMLESS = re.compile(
    r"(set|begin|start|commit|end|rollback|savepoint|release|show|reset|discard|close|fetch|deallocate)\b"
    r"|pragma\s+(?!(\w+\.)?(user_version|application_id)\s*[=(])"
)
_QUERY = re.compile(r"\(*\s*(select|values|table|with|declare)\b")
_EXPLAIN = re.compile(r"explain\s+(\([^)]*\)|analyze\b|verbose\b|query\s+plan\b|\s)*")
_WRITES = re.compile(
    r"(\bas\s*((not\s+)?materialized\s*)?\(|\))\s*(insert|update|delete|merge|replace)\b|\bselect\b.*\binto\b",
    re.DOTALL,
)
"""In a WITH, or SELECT … INTO a table."""
_COLUMNS = re.compile(
    r"(\bas\s+|\bwith\s+(recursive\s+)?|,\s*)[\w.]+\s*(?=\([\w\s,]*\)\s*(as\s*\(|$|,|where|join|on\b))"
)
"""A name with a list of columns, which is not a call."""
_CALL = re.compile(r"([\w.]+)\s*\(")

_WORDS = """
    all and any array as between by case collate cross cube distinct else end except exists fetch filter for
    from full grouping group having ilike in inner intersect interval is join lateral left like limit
    materialized natural not null offset on only or order outer over partition recursive returning right rollup
    row select set sets similar some table then to union using values when where with within bit char character
    decimal float nchar numeric nvarchar time timestamp timestamptz timetz varbit varchar vector
"""
_PURE = """
    abs age array_agg array_append array_cat array_length array_position array_prepend array_remove
    array_to_string ascii avg bit_and bit_or bool_and bool_or btrim cardinality cast cbrt ceil ceiling changes
    char_length character_length chr clock_timestamp coalesce concat concat_ws corr count cume_dist
    current_database current_date current_schema current_schemas current_setting current_time current_timestamp
    current_user currval date date_bin date_part date_trunc datetime decode dense_rank digest div encode every
    exp extract first_value floor format format_type gen_random_uuid generate_series generate_subscripts
    greatest group_concat hashtext hashtextextended hex hmac ifnull iif initcap instr json julianday
    justify_days justify_hours lag last_insert_rowid last_value lastval lead least length ln log log10 lower
    lpad ltrim make_date make_interval make_time make_timestamp make_timestamptz max md5 min mod mode now
    nth_value ntile nullif obj_description octet_length percent_rank percentile_cont percentile_disc position
    pow power printf quote quote_ident quote_literal random rank regexp_count regexp_like regexp_match
    regexp_matches regexp_replace regexp_split_to_array regexp_split_to_table repeat replace reverse round
    row_number row_to_json rpad rtrim sha224 sha256 sha384 sha512 sign similarity split_part sqlite_version
    sqrt starts_with statement_timestamp stddev stddev_pop stddev_samp strftime string_agg string_to_array
    strpos substr substring sum timediff timeofday to_char to_date to_json to_jsonb to_number to_timestamp
    to_tsquery to_tsvector total total_changes transaction_timestamp translate trim trunc ts_headline ts_rank
    ts_rank_cd typeof unhex unicode unixepoch unnest upper uuid_generate_v4 uuidv4 uuidv7 var_pop var_samp
    variance version websearch_to_tsquery plainto_tsquery phraseto_tsquery word_similarity pg_backend_pid
    pg_is_in_recovery pg_sleep pg_typeof pg_current_xact_id_if_assigned txid_current_if_assigned
"""
_KNOWN = frozenset((_WORDS + _PURE).split())
_PURE_FAMILY = re.compile(
    r"(jsonb?_|st_|pg_get_|pg_advisory_|pg_try_advisory_|pg_relation_|pg_total_relation_)\w+|has_\w+_privilege|\w+_is_visible"
)


def only_reads(sql: str) -> bool:
    """Whether every statement in the text plainly reads: no write in a WITH, no function that may change something."""
    return all(_reads(part.strip()) for part in plain_words(sql).split(";") if part.strip())


def is_query(sql: str) -> bool:
    """Whether every statement in the text asks for rows, whatever the functions do that it calls."""
    return all(_asks(part.strip()) for part in plain_words(sql).split(";") if part.strip())


def plain_words(sql: str) -> str:
    """Statements in lower case, without comments and quotes, and with empty texts."""
    return _NOISE.sub(lambda found: " " if found[0][0] in "-/" else "''", sql).replace('"', "").lower()


def _reads(statement: str) -> bool:
    if statement.startswith("explain"):
        statement = _EXPLAIN.sub("", statement, count=1)
    if _HARMLESS.match(statement):
        return not _unknown_calls(statement) or statement.startswith("pragma")
    return _asks(statement) and not _unknown_calls(statement)


def _asks(statement: str) -> bool:
    return bool(_QUERY.match(statement)) and not _WRITES.search(statement)


def _unknown_calls(statement: str) -> bool:
    """Whether it calls a function that is not known to change nothing."""
    names = (name.removeprefix("pg_catalog.") for name in _CALL.findall(_COLUMNS.sub(" ", statement)))
    return any(name not in _KNOWN and not _PURE_FAMILY.fullmatch(name) for name in names)
