"""Names and packing of tensors: rules that convert the tensors of one model code to those of another.

`rules` contains the types of a table and finds the rules that match names, `tables` reads it,
`apply` computes the results as views. This room does not depend on files of tensors, dtypes or layouts.
"""

from reshard.names.apply import Applied, AppliedStep, apply_rules
from reshard.names.frameworks import Naming, naming_of, plain_names, possible_plain_names, trainer_keys
from reshard.names.operations import SizedOperation, results
from reshard.names.published import UnknownNamesError, may_rename, published_table
from reshard.names.rules import HUB_SIDE, NameRules, settle, side_of, with_options
from reshard.names.sizes import Configuration, merged
from reshard.names.tables import (
    FUSED_EXPERTS,
    Edge,
    Path,
    builtin_names,
    config_beside,
    families_of,
    family_advice,
    family_named,
    is_foreign,
    name_one_of,
    parse_renames,
    parse_rules,
    path,
    read_config,
    read_rules,
    rules_named,
    table_of_model,
    tables_named,
)
