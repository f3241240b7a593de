from __future__ import annotations

import pytest

from jaxlookahead.bench.hlo import Program

# Sizes: table 1000 x 8 bf16 = 16000 bytes, cache 64 x 8 bf16 = 1024 bytes, weight 8 x 8 bf16 = 128 bytes.
_TEXT = """
HloModule jit_step, input_output_alias={ {0}: (1, {}, may-alias) }

%look_up (param_0: bf16[1000,8], param_1: s32[]) -> bf16[1,8] {
  %param_0 = bf16[1000,8]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  %constant.1 = s32[]{:T(128)} constant(0)
  ROOT %dynamic-slice.1 = bf16[1,8]{1,0:T(2,128)(2,1)S(1)} dynamic-slice(%param_0, %param_1, %constant.1), dynamic_slice_sizes={1,8}
}

%write (param_0.1: bf16[64,8], param_1.1: bf16[1,8]) -> bf16[64,8] {
  %param_0.1 = bf16[64,8]{1,0} parameter(0)
  %param_1.1 = bf16[1,8]{1,0} parameter(1)
  %constant.2 = s32[] constant(3)
  ROOT %dynamic-update-slice.1 = bf16[64,8]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %constant.2, %constant.2)
}

%renamed (param_0.2: bf16[8,8]) -> bf16[8,8] {
  %param_0.2 = bf16[8,8]{1,0} parameter(0)
  ROOT %bitcast.1 = bf16[8,8]{1,0} bitcast(%param_0.2)
}

%product (param_0.3: bf16[8,8], param_1.3: bf16[1,8]) -> bf16[1,8] {
  %param_0.3 = bf16[8,8]{1,0} parameter(0)
  %fusion.1 = bf16[8,8]{1,0} fusion(%param_0.3), kind=kLoop, calls=%renamed
  %param_1.3 = bf16[1,8]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[1,8]{1,0} convolution(%param_1.3, %fusion.1), dim_labels=bf_io->bf
}

%body (arg: (s32[], bf16[1,8])) -> (s32[], bf16[1,8]) {
  %arg = (s32[], bf16[1,8]{1,0:S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = bf16[1,8]{1,0:S(1)} get-tuple-element(%arg), index=1
  %all-reduce.1 = bf16[1,8]{1,0:S(1)} all-reduce(%x), to_apply=%add, metadata={op_name="jit(step)/forward/layer_0/add"}
  ROOT %tuple.1 = (s32[], bf16[1,8]{1,0:S(1)}) tuple(%i, %all-reduce.1)
}

%condition (arg.1: (s32[], bf16[1,8])) -> pred[] {
  %arg.1 = (s32[], bf16[1,8]{1,0:S(1)}) parameter(0)
  ROOT %constant.3 = pred[] constant(true)
}

ENTRY %main (table: bf16[1000,8], cache: bf16[64,8], weight: bf16[8,8], id: s32[]) -> bf16[64,8] {
  %table = bf16[1000,8]{1,0:T(8,128)(2,1)} parameter(0)
  %cache = bf16[64,8]{1,0} parameter(1)
  %weight = bf16[8,8]{1,0} parameter(2)
  %id = s32[]{:S(6)} parameter(3)
  %found = bf16[1,8]{1,0:S(1)} fusion(%table, %id), kind=kLoop, calls=%look_up
  %copy-start.1 = (bf16[8,8]{1,0:S(1)}, bf16[8,8]{1,0}, u32[]{:S(2)}) copy-start(%weight)
  %copy-done.1 = bf16[8,8]{1,0:S(1)} copy-done(%copy-start.1)
  %y = bf16[1,8]{1,0:S(1)} fusion(%copy-done.1, %found), kind=kOutput, calls=%product
  %z = bf16[1,8]{1,0:S(1)} fusion(%weight, %y), kind=kOutput, calls=%product
  %zero = s32[] constant(0)
  %start = (s32[], bf16[1,8]{1,0:S(1)}) tuple(%zero, %z)
  %while.1 = (s32[], bf16[1,8]{1,0:S(1)}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %new = bf16[1,8]{1,0:S(1)} get-tuple-element(%while.1), index=1
  %moved = bf16[64,8]{0,1} copy(%cache), metadata={op_name="jit(step)/commit/scatter"}
  ROOT %out = bf16[64,8]{1,0} fusion(%moved, %new), kind=kLoop, calls=%write, metadata={op_name="jit(step)/commit/put"}
}
"""  # noqa: E501


def test_only_what_crosses_main_memory_counts():
    parts = {
        "found": 16,  # one row of the table, to the core's memory
        "copy-start.1": 128,  # the weight, fetched ahead
        "z": 128,  # the weight, read in place
        "moved": 2 * 1024,  # the cache, read and written
        "out": 16,  # a new row, in place
    }
    assert Program.parse(_TEXT).traffic() == sum(parts.values())


def test_collectives_and_copies_are_found():
    program = Program.parse(_TEXT)
    assert program.collectives() == {("all-reduce", "jit(step)/forward/layer_0/add"): 3}
    assert [x.name for x in program.copies({(64, 8)})] == ["moved"]
    assert not program.copies({(8, 8)})


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no compiled program"):
        Program.parse("HloModule nothing")
