"""What agent SQL may call: an allow-list, because the engine has a thousand functions and gains more.

Out on purpose, though harmless to read: anything that makes its output as big as an argument says (repeat,
padding, printf, scalar range, list_resize, to_base), sleeping, sequences, variables, settings, statistics,
enum listing, logging, binary strings, SQL from a string, and every reader of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


def names(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


OPERATORS: Final = names(
    "+ - * / // % ** ^ || & | ~ << >> = == <> != < <= > >= -> ->> @> <@ && @ ! !__postfix <=> <-> ^@"
    " ~~ !~~ ~~* !~~* ~~~ !~~~ !~"
)

AGGREGATES: Final = names(
    """
    any_value approx_count_distinct approx_quantile approx_top_k arbitrary arg_max arg_max_null
    arg_max_nulls_last arg_min arg_min_null arg_min_nulls_last argmax argmin array_agg avg bit_and bit_or
    bit_xor bool_and bool_or corr count count_if count_star countif covar_pop covar_samp entropy favg first
    fsum geomean geometric_mean group_concat histogram json_group_array json_group_object
    json_group_structure kahan_sum kurtosis kurtosis_pop last list listagg mad max max_by mean median min
    min_by mode product quantile quantile_cont quantile_disc regr_avgx regr_avgy regr_count regr_intercept
    regr_r2 regr_slope regr_sxx regr_sxy regr_syy reservoir_quantile sem skewness stddev stddev_pop
    stddev_samp string_agg sum sum_no_overflow sumkahan var_pop var_samp variance wavg weighted_avg
    """
)

WINDOWS: Final = AGGREGATES | names(
    """
    cume_dist dense_rank fill first_value lag last_value lead nth_value ntile percent_rank rank rank_dense
    row_number
    """
)

_NUMBERS = """
    abs acos acosh add asin asinh atan atan2 atanh bit_count cbrt ceil ceiling cos cosh cot degrees divide
    even exp factorial fdiv floor fmod gamma gcd greatest greatest_common_divisor isfinite isinf isnan lcm
    least least_common_multiple lgamma ln log log10 log2 mod multiply nextafter pi pow power radians random
    round round_even roundbankers sign signbit sin sinh sqrt subtract tan tanh trunc xor
    """

_TEXT = """
    ascii bin bit_length char_length character_length chr concat concat_ws contains damerau_levenshtein
    editdist3 ends_with gen_random_uuid hamming hash hex ilike_escape instr jaccard jaro_similarity
    jaro_winkler_similarity lcase left left_grapheme len length length_grapheme levenshtein like_escape
    lower ltrim md5 md5_number mismatches nfc_normalize not_ilike_escape not_like_escape ord overlay
    position prefix regexp_escape regexp_extract regexp_extract_all regexp_full_match regexp_matches
    regexp_replace regexp_split_to_array regexp_split_to_table replace reverse right right_grapheme rtrim
    sha1 sha256 split split_part starts_with str_split str_split_regex string_split string_split_regex
    string_to_array strip_accents strlen strpos substr substring substring_grapheme suffix to_hex translate
    trim ucase unicode upper url_decode url_encode uuid
    """

_CHOICE = "alias coalesce constant_or_null if ifnull nullif typeof unnest"

_NESTED = """
    apply array_aggr array_aggregate array_append array_apply array_cat array_concat array_contains
    array_cosine_distance array_cosine_similarity array_cross_product array_distance array_distinct
    array_dot_product array_extract array_filter array_grade_up array_has array_has_all array_has_any
    array_indexof array_inner_product array_intersect array_length array_negative_dot_product
    array_negative_inner_product array_pop_back array_pop_front array_position array_prepend
    array_push_back array_push_front array_reduce array_reverse array_reverse_sort array_select array_slice
    array_sort array_to_string array_to_string_comma_default array_transform array_unique array_value
    array_where array_zip cardinality element_at filter flatten grade_up list_aggr list_aggregate
    list_any_value list_append list_apply list_approx_count_distinct list_avg list_bit_and list_bit_or
    list_bit_xor list_bool_and list_bool_or list_cat list_concat list_contains list_cosine_distance
    list_cosine_similarity list_count list_distance list_distinct list_dot_product list_element
    list_entropy list_extract list_filter list_first list_grade_up list_has list_has_all list_has_any
    list_histogram list_indexof list_inner_product list_intersect list_kurtosis list_kurtosis_pop list_last
    list_mad list_max list_median list_min list_mode list_negative_dot_product list_negative_inner_product
    list_pack list_position list_prepend list_product list_reduce list_reverse list_reverse_sort
    list_select list_sem list_skewness list_slice list_sort list_stddev_pop list_stddev_samp
    list_string_agg list_sum list_transform list_unique list_value list_var_pop list_var_samp list_where
    list_zip map map_concat map_contains map_contains_entry map_contains_value map_entries map_extract
    map_extract_value map_from_entries map_keys map_values reduce row struct_concat struct_contains
    struct_extract struct_extract_at struct_has struct_indexof struct_insert struct_keys struct_pack
    struct_position struct_update struct_values union_extract union_tag union_value
    """

_JSON = """
    array_to_json from_json from_json_strict json json_array json_array_length json_contains
    json_deep_merge json_exists json_extract json_extract_path json_extract_path_text json_extract_string
    json_insert json_keys json_merge_patch json_normalize json_object json_pretty json_quote json_remove
    json_replace json_set json_strip_nulls json_structure json_transform json_transform_strict json_type
    json_valid json_value row_to_json to_json variant_array_length variant_contains variant_exists
    variant_extract variant_extract_string variant_keys variant_type variant_typeof
    """

_TIME = """
    age ago century current_date current_localtime current_localtimestamp date_add date_diff date_part
    date_sub date_trunc datediff datepart datesub datetrunc day dayname dayofmonth dayofweek dayofyear
    days_in_month decade epoch epoch_ms epoch_ns epoch_us era get_current_time get_current_timestamp hour
    isodow isoyear julian last_day make_date make_time make_timestamp make_timestamp_ms make_timestamp_ns
    make_timestamptz microsecond millennium millisecond minute month monthname nanosecond
    normalized_interval now quarter second strftime strptime time_bucket timezone timezone_hour
    timezone_minute to_centuries to_days to_decades to_hours to_microseconds to_millennia to_milliseconds
    to_minutes to_months to_quarters to_seconds to_timestamp to_weeks to_years today transaction_timestamp
    try_strptime week weekday weekofyear year yearweek
    """

FUNCTIONS: Final = AGGREGATES | names(_NUMBERS + _TEXT + _CHOICE + _NESTED + _JSON + _TIME)

TABLE_FUNCTIONS: Final = names("unnest range generate_series json_each json_tree")

TYPES: Final = names(
    """
    tinyint smallint integer int bigint hugeint utinyint usmallint uinteger ubigint uhugeint bignum int1 int2
    int4 int8 int16 int32 int64 int128 uint8 uint16 uint32 uint64 uint128 short long signed integral float
    float4 float8 real double numeric decimal dec varchar char bpchar text string nvarchar boolean bool
    logical date time timetz timestamp timestamp_s timestamp_ms timestamp_us timestamp_ns datetime
    timestamptz interval uuid guid json variant list array struct map union row tuple
    """
) | {"time with time zone", "timestamp with time zone"}

INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "range": "Use it as a table: FROM range(1, 10) AS r(n).",
        "generate_series": "Use it as a table: FROM generate_series(1, 10) AS r(n).",
        "repeat": "Text cannot be multiplied here.",
        "lpad": "Pad after the query: the result is data, not a report.",
        "rpad": "Pad after the query: the result is data, not a report.",
        "format": "Join text with || or concat().",
        "printf": "Join text with || or concat().",
        "list_resize": "Use list_slice() to cut a list.",
        "array_resize": "Use list_slice() to cut a list.",
        "encode": "Binary values are not available; hash text with md5() or sha256().",
        "read_csv": "Files cannot be read; the published tables are all there is.",
        "read_parquet": "Files cannot be read; the published tables are all there is.",
        "read_text": "Files cannot be read; read a run's log or transcript with read_run.",
        "query": "Write the query itself: SQL from a string is never run.",
        "query_table": "Write the table's name itself.",
    }
)
