// What Python passes to the kernels. extension.py reads these structs: members of one type a line, then their meaning.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

namespace spark {

struct Routing {
  const void* ids;        // int32 or int64 [pairs], the flattened routing table
  const int32_t* map;     // global expert -> local expert or -1; null when all experts are here
  int ids_are_64_bit;
  int pairs, top_k, experts, global_experts;
  int tile_tokens;        // most tokens of a tile
  int row_multiple;       // each expert's first row is a multiple of it
  int32_t* row_of_pair;   // [pairs], -1 where the expert is not here
  int32_t* token_of_row;  // [rows]
  int4* tiles;            // {expert, first row, tokens, 0}
  int32_t* tile_count;    // [1]
};

// Activations in the order of columns in which the first product takes them, see pair_at.
struct Ordering {
  const uint4* x;  // [tokens][vectors]: eight columns each
  uint4* ordered;  // [tokens][chunks of 64 columns][8], or planes; zeros behind the last column; null: not needed
  int tokens, vectors, chunks;
};

struct Gemm {
  const uint8_t* weight;     // [experts][row tiles][chunks][CHUNK_BYTES], see layout.py
  const float* bias;         // [experts][row tiles · 64] in the weights' order of rows
  const uint8_t* x;          // planes [chunks][rows][PLANE_BYTES]; first with S::GATHERS: [tokens][chunks][PLANE_BYTES]
  __nv_bfloat16* out;        // SWIGLU: planes [row tiles / 2][rows][PLANE_BYTES]; else [rows][columns]
  const int32_t* token_of_row;  // for the first product
  const int4* tiles;
  const int32_t* tile_count;
  int chunks, row_tiles, columns;
  int64_t rows;
  float alpha, limit, shift;  // of the activation; 1, infinity and 0 make it SwiGLU with plain SiLU
};

// Activations as the kernel reads them: `vectors` of 16 bytes for each row.
struct Input {
  const uint8_t* at;
  int64_t stride;  // bytes
  int vectors;
};

struct Layer {
  Gemm first, second;     // second.out is the layer's result [tokens][columns]; `tiles` if sorted
  Routing routing;
  Input x, hidden;        // x [tokens]; hidden [rows] is first.out
  float* partial;         // [rows][parts][second.row_tiles · 64]
  int32_t* taken;         // how many items are taken from the counter
  const float* shares;    // [pairs]
  int sorted;             // a kernel before this one has sorted the pairs
  int parts, part_chunks, tokens, top_k;
  int first_at_once, second_at_once;  // stages of weights in flight, for the first and the second product
};

struct Linear {
  const uint8_t* weight;         // [tiles][chunks][chunk bytes], see linear.py
  const float* row_scales;       // FP8: [tiles · 16]
  const __nv_bfloat16* bias;     // [rows] or null
  const __nv_bfloat16* x;        // [tokens][x_stride]
  __nv_bfloat16* out;            // [tokens][rows]
  int tokens, rows, columns, chunks, tiles, token_groups;
  int64_t x_stride;
};

struct Router {
  const __nv_bfloat16* weight;  // [experts][columns]
  const __nv_bfloat16* bias;    // [experts] or null
  const __nv_bfloat16* x;       // [tokens][x_stride]
  const uint8_t* padding;       // [tokens] or null: not 0 where a token is padding, which gets expert -1
  float* shares;                // [tokens][top_k]
  int32_t* ids;                 // [tokens][top_k]
  float* parts;                 // route_by_ticket: [slices][tokens][experts]
  unsigned* ticket;             // route_by_ticket: one number, 0 before and after every launch
  int tokens, experts, columns, top_k;
  int64_t x_stride;
};

struct Attention {
  const __nv_bfloat16* query;   // [tokens][query_stride], heads one after the other
  const __nv_bfloat16* key;     // [tokens][key_stride]
  const __nv_bfloat16* value;   // [tokens][value_stride]
  __nv_bfloat16* cache;         // keys of a token and head, then its values: 128 numbers
  const int32_t* table;         // [tokens][table_stride]: the cache's blocks of each sequence
  const int32_t* lengths;       // [tokens]: tokens of the sequence with the new one; 0 for padding
  const int64_t* slots;         // [tokens]: where the new token's key and value go; negative: nowhere
  const __nv_bfloat16* sinks;   // [query heads] or null
  const float* rotation;        // [positions][64]: cosines, sines; null: query and key are rotated already
  __nv_bfloat16* output;        // [tokens][query heads][64]
  float* parts;                 // [tokens][key heads][splits][ATTENTION_PART]
  unsigned* tickets;            // [tokens][key heads], 0 before and after every launch
  int tokens, key_heads, group, splits, least, window, block_size;  // least: steps for a block; window 0: all tokens
  int64_t query_stride, key_stride, value_stride, table_stride, cache_block, cache_head, cache_token;
  float scale;
};

struct Rotation {
  const __nv_bfloat16* query;  // [tokens][query_stride]
  const __nv_bfloat16* key;    // [tokens][key_stride]
  const __nv_bfloat16* value;  // [tokens][value_stride]
  __nv_bfloat16* cache;        // as Attention's
  const int32_t* starts;       // [sequences + 1]: the first token of each sequence
  const int32_t* lengths;      // [sequences]: tokens of each with these
  const int64_t* slots;        // [tokens]
  const float* rotation;       // [positions][64]
  __nv_bfloat16* output;       // [tokens][query heads][64]: the rotated query
  int tokens, sequences, query_heads, key_heads, block_size;
  int64_t query_stride, key_stride, value_stride, cache_block, cache_head, cache_token;
};

struct Norm {
  const __nv_bfloat16* x;         // [tokens][columns]
  const __nv_bfloat16* residual;  // [tokens][columns]
  const __nv_bfloat16* weight;    // [columns]
  __nv_bfloat16* output;          // [tokens][columns]
  __nv_bfloat16* sum;             // [tokens][columns]: the next residual
  int tokens, columns;
  float epsilon;
};

}  // namespace spark
