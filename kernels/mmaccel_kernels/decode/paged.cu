// Attention over packed pages with few instructions a byte: what the Triton loop of paged.py computes, by hand.
//
// Compiled by NVRTC for one configuration, which stands in macros (cuda.py). Everything that is no plain C++ is in the section
// "instructions", which tests replace in order to run this file on a CPU.
//
// A warp reads units of UNIT tokens. A unit is whole: its rows of bytes lie one behind the other. Scales of channels serve all of
// it, or one of its SPANS. Keys may stand in two planes, the OTHER one of signs, of which two units share bytes. So they do the
// highest bits of codes of three, which stand behind the rows of the lower two.
// Of m16n8k16, keys are the 16 rows of the first product, channels those of the second:
//   S^T = K Q^T, 16 tokens a tile: lane (g, t) has tokens g and g + 8, columns (query rows) 2t and 2t + 1
//   O^T = V^T P^T, 16 channels a tile: lane (g, t) has two of its own channels, the same columns
// and transposing an 8 x 8 block of S^T (movmatrix) gives what the second product takes of P^T. Which channel is which k of the
// first and which row of the second is free, so each lane takes words of four neighbours.
//
// A code is a number already: as bits of float16, c 2^k is c 2^(k - 24). Where in its byte it stood (2^k) is taken back in the
// exponent of the softmax. The running maximum is raised only when it grew by more than RISE; weights are at most 2^RISE and
// lifted by 2^LIFT, so that small ones keep their digits and scales of tokens up to 1023.5 do not carry them beyond float16.

#ifndef ON_HOST
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
#endif

struct Args {
    const u16 *query;
    const u8 *mask;
    float *part, *part_lse;
    const int *cu_pages;
    const u8 *key_codes;
    const u16 *key_scale, *key_zero;
    const u8 *other_codes;
    const u16 *other_scale;
    const u8 *value_codes;
    const u16 *value_scale, *value_zero;
    const int *channels, *other_channels, *count, *meta, *table, *columns;
    i64 mask_b, mask_h, mask_q;
    float scale;
    int heads, kv_heads, rows, queries;
};

struct alignas(16) Words { u32 x, y, z, w; };
struct alignas(8) Pair { u32 x, y; };

// --- instructions ----------------------------------------------------------------------------------------------------
#ifndef ON_HOST
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(128, BLOCKS)

DEVICE int thread() { return threadIdx.x; }
// what is made of it is not made before a loop for what comes behind it, to be kept in registers meanwhile
DEVICE int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
DEVICE int block(int axis) { return axis ? blockIdx.y : blockIdx.x; }
DEVICE int blocks() { return gridDim.x; }
DEVICE u8 *shared_memory() {
    extern __shared__ __align__(16) u8 memory[];
    return memory;
}
DEVICE void wait_for_block() { __syncthreads(); }
DEVICE void wait_for_warp() { __syncwarp(); }
DEVICE bool any(bool x) { return __any_sync(~0u, x); }
DEVICE int count_of_block(bool x) { return __syncthreads_count(x); }
DEVICE float from_lane(float x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE float from_other(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
template <int BYTES> DEVICE void copy(u8 *to, const void *from) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// the same of 8 instead of 16
DEVICE void multiply_half(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}
DEVICE u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_of(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// two float16, the first in the lower half
DEVICE u32 halves(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE float half(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEVICE u32 times(u32 x, u32 y) {
    u32 z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
DEVICE u32 bytes(u32 x, u32 y, u32 which) { return __byte_perm(x, y, which); }
// an address that is kept, where the compiler would rather add it up again every time
DEVICE void keep(const u8 *&x) { asm volatile("" : "+l"(x)); }
DEVICE float number(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits(float x) { return __float_as_uint(x); }
#endif

// --- the configuration -----------------------------------------------------------------------------------------------
// of three bits, BITS are the lower two
constexpr bool THREE = BOOK == 4;
constexpr int DIGITS = 8 / BITS;
constexpr int ROWS = UNIT / DIGITS;          // of bytes in a unit
constexpr int EIGHTS = ROWS / 8;
constexpr int TILES = UNIT / 16;             // of 16 tokens
constexpr int UNITS = PAGE / UNIT;           // of a page
constexpr int WORDS = WIDTH / 32;            // of a row of values that a lane has
constexpr int GROUPS = VALUE_BY_CHANNEL ? 1 : WIDTH / VALUE_GROUP;
constexpr int LIFT = VALUE_BY_CHANNEL ? 10 : 4;
constexpr int RISE = 2;
// pages of a head that have scales of channels in common are read in one run
constexpr bool POOLED = VALUE_BY_CHANNEL && VALUE_GROUP == PAGE;
static_assert(!POOLED || (KEY_BY_CHANNEL && KEY_GROUP == PAGE), "");
// groups of tokens of a unit whose channels have scales of their own
constexpr bool GROUPED = VALUE_BY_CHANNEL && !POOLED;
// whether codes are multiplied by the query as it is loaded, and not by one with the scales of a group
constexpr bool FOLDED = POOLED || !KEY_BY_CHANNEL;
constexpr int SPANS = KEY_BY_CHANNEL && KEY_GROUP < UNIT ? UNIT / KEY_GROUP : 1;
constexpr int SPAN = TILES / SPANS;          // tiles of one
static_assert(!GROUPED || (KEY_BY_CHANNEL && KEY_GROUP == VALUE_GROUP && UNIT % KEY_GROUP == 0), "");
// units that share the bytes of signs
constexpr int TOGETHER = 8 * TILE / UNIT > 0 ? 8 * TILE / UNIT : 1;
static_assert(!OTHER_WIDTH || (GROUPED && BITS == 2 && UNIT == 4 * TILE), "");
static_assert(!THREE || (BITS == 2 && UNIT == 4 * TILE), "");
// tiles whose levels are looked up at once, and which those are: the digits of both stand in the same half bytes
constexpr int AT_ONCE = BOOK ? 2 : 1, APART = TILES / AT_ONCE;
static_assert(!BOOK || (TILE == 16 && TILES == DIGITS), "");
constexpr float SMALLEST = BOOK ? 1.f : FP8 ? 256.f : 16777216.f;
constexpr float NONE = -1e30f;

// A plane of keys: its channels, those of a word of a lane, and its words among those of both planes.
template <bool OTHER> struct Keys {
    static constexpr int width = OTHER ? OTHER_WIDTH : KEY_WIDTH;
    static constexpr int wide = width / 64;         // runs of 64 channels: 16 bytes a lane
    static constexpr int narrow = width % 64 / 16;  // runs of 16 beyond them: 4 bytes a lane
    static constexpr int words = 4 * wide + narrow;
    static constexpr int first = OTHER ? KEY_WIDTH / 64 * 4 + KEY_WIDTH % 64 / 16 : 0;
    static constexpr int each = narrow ? narrow : 1;
    static constexpr int line = 2 * (KEY_BY_CHANNEL ? width : UNIT);  // bytes of a row of scales
};
constexpr int KEY_WORDS = Keys<false>::words + Keys<true>::words;

// what is where in a stage of a warp
constexpr int KEY_CODES = 0;
constexpr int OTHER_CODES = KEY_CODES + ROWS * KEY_WIDTH;
constexpr int VALUE_CODES = OTHER_CODES + ROWS * OTHER_WIDTH;
constexpr int KEY_HIGHEST = VALUE_CODES + ROWS * WIDTH;
constexpr int VALUE_HIGHEST = KEY_HIGHEST + THREE * ROWS * KEY_WIDTH;
constexpr int KEY_SCALES = VALUE_HIGHEST + THREE * ROWS * WIDTH;
DEVICE constexpr int space_of(int bytes) { return POOLED ? 0 : bytes > 256 ? bytes : 256; }
constexpr u32 KEY_ROW = Keys<false>::line * SPANS, OTHER_ROW = Keys<true>::line * SPANS;
constexpr u32 VALUE_ROW = 2 * (GROUPED ? WIDTH * SPANS : UNIT * GROUPS);
constexpr int KEY_SPACE = space_of(KEY_ROW), VALUE_SPACE = space_of(VALUE_ROW);
constexpr int OTHER_SCALES = KEY_SCALES + KEY_SPACE * (1 + KEY_AFFINE);
constexpr int VALUE_SCALES = OTHER_SCALES + (OTHER_WIDTH ? space_of(OTHER_ROW) : 0);
constexpr int COUNT = VALUE_SCALES + VALUE_SPACE * (1 + VALUE_AFFINE);
constexpr int STAGE = COUNT + 16;


// of eight tokens of a unit: the digit of their bytes, and the eight rows of these
DEVICE constexpr int digit_of(int eight) { return DIGITS == 1 ? 0 : eight * 8 / TILE % DIGITS; }
DEVICE constexpr int rows_of(int eight) {
    return DIGITS == 1 ? eight : (eight * 8 / TILE / DIGITS * TILE + eight * 8 % TILE) / 8;
}

// two codes as they stand in the lower byte of either half, as float16
template <bool SHIFTED, bool SIGN = false> DEVICE u32 codes(u32 word, int digit) {
#if FP8
    // e4m3 as bits of float16 are a 256th of it
    if (SHIFTED) return (word & 0x80008000u) | ((word >> 1) & 0x3f803f80u);
    return ((word << 8) & 0x80008000u) | ((word << 7) & 0x3f803f80u);
#else
    constexpr int each = SIGN ? 1 : BITS;
    constexpr u32 mask = ((1u << each) - 1) * 0x00010001u;
    return (SHIFTED ? word >> 8 : word) & (mask << (digit * each));
#endif
}

// Of every digit both pairs of codes of a word: bytes 0 and 2, 1 and 3; of levels bytes 0 and 1, 2 and 3. Of codes of three bits
// ``highest`` has the highest.
template <bool SIGN = false> DEVICE void pairs(u32 (&out)[DIGITS][2], u32 word, u32 highest) {
#if BOOK
    // Half a byte says which of eight levels, and two of every byte are looked up at once: digits d and d + DIGITS / 2. Where codes
    // have four bits, those are the positive levels, and the highest bit is the sign.
#pragma unroll
    for (int d = 0; d < DIGITS / 2; d++) {
        u32 rank = word >> d * BITS & (BOOK == 8 ? 0x77777777u : 0x33333333u);
        if (THREE) rank |= (highest << (2 - d) & 0x04040404u) | (highest << (4 - d) & 0x40404040u);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 which = h ? rank >> 16 : rank, low = bytes(BOOK_0, BOOK_1, which);
            u32 high = bytes(BOOK_2, BOOK_3, which);
            if (BOOK == 8) high |= bytes(word << 4, word, h ? 0x7362 : 0x5140) & 0x80808080u;
            out[d][h] = bytes(low, high, 0x6240);
            out[d + DIGITS / 2][h] = bytes(low, high, 0x7351);
        }
    }
#else
#pragma unroll
    for (int d = 0; d < DIGITS; d++) out[d][0] = codes<false, SIGN>(word, d), out[d][1] = codes<true, SIGN>(word, d);
#endif
}

DEVICE Words read(const u8 *at) { return *(const Words *)at; }
DEVICE u32 word_of(const Words &of, int i) { return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w; }
DEVICE Pair read_pair(const u8 *at) { return *(const Pair *)at; }
DEVICE u32 read_word(const u8 *at) { return *(const u32 *)at; }
DEVICE float least(float x, float y) { return x < y ? x : y; }
DEVICE float most(float x, float y) { return x > y ? x : y; }
DEVICE u32 at_most(u32 x, u32 y) { return x < y ? x : y; }

// --- the query -------------------------------------------------------------------------------------------------------
// Of lane (g, t) the channels of query row g: pairs of neighbours, four channels after four. Word i of run j of 64 channels is
// that of channels 64j + 16t + 4i and on, that of a run of 16 those of 4t and on.
template <bool OTHER> DEVICE constexpr int channel_of(int word, int t) {
    constexpr int wide = Keys<OTHER>::wide;
    return word < 4 * wide ? word / 4 * 64 + 16 * t + word % 4 * 4 : 64 * wide + (word - 4 * wide) * 16 + 4 * t;
}

DEVICE float query_number(u16 bits_) {
#if BFLOAT16
    return number((u32)bits_ << 16);
#else
    return half(bits_);
#endif
}

// number ``c`` of four of word ``word`` of both planes
DEVICE float query_at(const Args &a, int head, int row, int word, int t, int c) {
    if (row >= a.rows) return 0;
    int channel;
    if (word < Keys<true>::first) {
        channel = channel_of<false>(word, t) + c;
        if (PART) channel = a.channels[(i64)head * KEY_WIDTH + channel];
    } else {
        channel = a.other_channels[(i64)head * OTHER_WIDTH + channel_of<true>(word - Keys<true>::first, t) + c];
    }
    return query_number(a.query[((i64)head * a.rows + row) * CHANNELS + channel]);
}

// two words of neighbours in the order of codes: of four channels the even ones and the odd ones, and as they are for levels
DEVICE void in_order(u32 *out, u32 x, u32 y) {
    out[0] = BOOK ? x : bytes(x, y, 0x5410), out[1] = BOOK ? y : bytes(x, y, 0x7632);
}

// Where word ``i`` of the query stands, of those of a lane. Of four words in a run of 64 channels the even ones come first where
// the scales of groups are yet to be multiplied in: so they are pairs of registers for products with zero points.
DEVICE u32 &query_word(u32 *query, int i, int lane) {
    const int from = i < 2 * Keys<true>::first ? 0 : 2 * Keys<true>::first, run = i - from;
    const bool wide = run < 8 * (from ? Keys<true>::wide : Keys<false>::wide);
    if (!wide) return query[(from + run / 2 * 2) * 32 + lane * 2 + i % 2];
    const int at = FOLDED ? run % 4 : run % 2 * 2 + run % 4 / 2;
    return query[(from + run / 4 * 4) * 32 + lane * 4 + at];
}

// The query as float16 times a power of two, for every lane in shared memory. What logits are to be multiplied by for it, and
// with scales of a whole run what their zero points in row ``at`` add.
DEVICE float load_query(u32 *query, float (&added)[2], const Args &a, int head, int first_row, i64 at, int lane) {
    const int row = first_row + (lane >> 2), t = lane & 3;
    float top = 0;
#pragma unroll 1
    for (int i = 0; i < 4 * KEY_WORDS; i++) {
        const float x = query_at(a, head, row, i / 4, t, i % 4);
        top = most(top, x < 0 ? -x : x);
    }
    top = most(top, from_other(top, 1));
    top = most(top, from_other(top, 2));
    // a power of two of which all channels are at most a half, so that no scale carries one beyond float16
    const u32 exponent = bits(top) & 0x7f800000u;
    const float unit = number(exponent ? exponent : 0x3f800000u) * 4, over = 1 / unit;
    float sums[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < KEY_WORDS; i++) {
        u32 q[2];
        for (int c = 0; c < 2; c++)
            q[c] = halves(query_at(a, head, row, i, t, 2 * c) * over, query_at(a, head, row, i, t, 2 * c + 1) * over);
        if (POOLED) {
            const i64 of = at * KEY_WIDTH + channel_of<false>(i, t);
            const u32 scales[2] = {read_word((const u8 *)(a.key_scale + of)), read_word((const u8 *)(a.key_scale + of + 2))};
            if (KEY_AFFINE) {
                const u32 x = read_word((const u8 *)(a.key_zero + of)), y = read_word((const u8 *)(a.key_zero + of + 2));
                multiply(sums, x, x, y, y, q[0], q[1]);
            }
            for (int c = 0; c < 2; c++) q[c] = times(q[c], scales[c]);
        }
        if (FOLDED) in_order(q, q[0], q[1]);
        for (int c = 0; c < 2; c++) query_word(query, 2 * i + c, lane) = q[c];
    }
    const float factor = a.scale * unit;
    for (int c = 0; c < 2; c++) added[c] = sums[c] * from_lane(factor, 8 * t + 4 * c);
    return factor;
}

// --- the loop --------------------------------------------------------------------------------------------------------
// What a warp has found, of lane (g, t) and columns 2t and 2t + 1.
struct State {
    float highest[2];
    float sums[4];              // of weights; of weights times zero points of the group g % GROUPS
    float out[2 * WORDS][4];    // of channels 4i, 4i + 1 and 4i + 2, 4i + 3 of the lane
};

// Where a lane finds its part of page 0 and of row 0 of scales; lanes 0 to 15 copy scales, the others zero points.
struct Codes {
    const u8 *wide, *narrow, *scales;
};
struct Sources {
    Codes keys, other;
    const u8 *values, *value_scales;
    const int *count;
    u32 highest;                // units from that of the lower bits to that with the highest ones
};

// Bytes from a unit of a page to the next, and from a page to the next.
constexpr u32 KEY_BYTES = ROWS * KEY_WIDTH, OTHER_BYTES = ROWS * OTHER_WIDTH, VALUE_BYTES = ROWS * WIDTH;
constexpr u32 OF_SIGNS = (UNITS + TOGETHER - 1) / TOGETHER, ALL = UNITS + THREE * OF_SIGNS;
constexpr u32 KEY_PAGE = KEY_BYTES * ALL, OTHER_PAGE = OTHER_BYTES * OF_SIGNS, VALUE_PAGE = VALUE_BYTES * ALL;
constexpr u32 LINES = KEY_BY_CHANNEL ? PAGE / KEY_GROUP : UNITS;
constexpr u32 VALUE_META = GROUPED ? 2 * WIDTH * (PAGE / VALUE_GROUP) : VALUE_ROW * UNITS;
DEVICE u32 row_of(u32 place) { return KEY_BY_CHANNEL ? place * UNIT / KEY_GROUP : place; }

template <bool OTHER> DEVICE Codes codes_of(const u8 *codes, const u8 *scales, int lane) {
    using K = Keys<OTHER>;
    return {
        codes + lane / 4 * K::width + lane % 4 * 16,
        codes + lane / K::each * K::width + K::wide * 64 + lane % K::each * 16,
        scales + lane % 16 * 16,
    };
}

template <bool OTHER> DEVICE void to_place(Codes &from, u32 codes, u32 place) {
    from.wide += codes, from.narrow += codes, from.scales += row_of(place) * Keys<OTHER>::line;
    if (Keys<OTHER>::wide || !OTHER) keep(from.wide);
    if (Keys<OTHER>::narrow) keep(from.narrow);
    if (!POOLED) keep(from.scales);
}

DEVICE void to_place(Sources &from, u32 place) {
    to_place<false>(from.keys, place * KEY_BYTES, place);
    if (OTHER_WIDTH) to_place<true>(from.other, place / TOGETHER * OTHER_BYTES, place);
    from.values += place * VALUE_BYTES, from.value_scales += place * VALUE_ROW;
    keep(from.values);
    if (!POOLED) keep(from.value_scales);
    from.highest = UNITS - place + place / TOGETHER;
}

// Rows of scales are 256 bytes apart at least, so that half of the lanes have one.
template <int BYTES, bool AFFINE> DEVICE void copy_scales(u8 *to, const u8 *from, int lane) {
    constexpr int space = BYTES > 256 ? BYTES : 256;
#pragma unroll
    for (int i = 0; i < BYTES; i += 256)
        if ((i + 256 <= BYTES || i + lane % 16 * 16 < BYTES) && (AFFINE || lane < 16))
            copy<16>(to + lane / 16 * space + lane % 16 * 16 + i, from + i);
}

// Start to copy the codes of a plane of keys.
template <bool OTHER> DEVICE void issue_keys(u8 *to, const Codes &from, u64 offset, int lane) {
    using K = Keys<OTHER>;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int j = 0; j < K::wide; j++)
            copy<16>(to + (e * K::wide + j) * 512 + lane * 16, from.wide + offset + e * 8 * K::width + j * 64);
    if (K::narrow) {
        // 16 bytes of a row a lane, row after row
        constexpr int step = 32 / K::each;
#pragma unroll
        for (int row = 0; row < ROWS; row += step)
            if (row + lane / K::each < ROWS && lane < step * K::each)
                copy<16>(to + K::wide * 64 * ROWS + row * K::each * 16 + lane * 16, from.narrow + offset + row * K::width);
    }
}

// Start to copy codes of values.
DEVICE void issue_values(u8 *to, const u8 *from, int lane) {
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            copy<4 * WORDS>(to + (e * 2 + r) * 128 * WORDS + lane * 4 * WORDS, from + (e * 8 + r) * WIDTH);
}

// Start to copy a unit of page ``index``, whose scales are in row ``at``.
DEVICE void issue(u8 *stage, const Sources &from, u32 index, u32 at, int lane) {
    const u8 *values = from.values + (u64)index * VALUE_PAGE;
    issue_keys<false>(stage + KEY_CODES, from.keys, (u64)index * KEY_PAGE, lane);
    if (OTHER_WIDTH) issue_keys<true>(stage + OTHER_CODES, from.other, (u64)index * OTHER_PAGE, lane);
    issue_values(stage + VALUE_CODES, values, lane);
    if (THREE) {
        issue_keys<false>(stage + KEY_HIGHEST, from.keys, (u64)index * KEY_PAGE + from.highest * KEY_BYTES, lane);
        issue_values(stage + VALUE_HIGHEST, values + from.highest * VALUE_BYTES, lane);
    }
    if (!POOLED) {
        copy_scales<KEY_ROW, KEY_AFFINE>(stage + KEY_SCALES, from.keys.scales + (u64)at * (Keys<false>::line * LINES), lane);
        if (OTHER_WIDTH)
            copy_scales<OTHER_ROW, false>(stage + OTHER_SCALES, from.other.scales + (u64)at * (Keys<true>::line * LINES), lane);
        copy_scales<VALUE_ROW, VALUE_AFFINE>(stage + VALUE_SCALES, from.value_scales + (u64)at * VALUE_META, lane);
    }
    if (lane == 0) copy<4>(stage + COUNT, from.count + index);
}

// the query times the scales of a group of tokens, in the order of codes
template <int COUNT_> DEVICE void fold(u32 (&out)[COUNT_], const u32 *q, const u32 *scales) {
#pragma unroll
    for (int i = 0; i < COUNT_; i += 2) in_order(out + i, times(q[i], scales[i]), times(q[i + 1], scales[i + 1]));
}

// products of one word of every lane of keys, of all tokens of a unit, with words i and i + 1 of the query of every span
template <bool OTHER, int N>
DEVICE void multiply_words(
    float (&s)[TILES][4], const u32 (&word)[EIGHTS], const u32 (&highest)[EIGHTS], const u32 (&q)[SPANS][N], int i
) {
    u32 of[EIGHTS][DIGITS][2];
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) pairs<OTHER>(of[e], word[e], highest[e]);
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        const u32 (&x)[2] = of[rows_of(2 * k)][digit_of(2 * k)], (&y)[2] = of[rows_of(2 * k + 1)][digit_of(2 * k + 1)];
        multiply(s[k], x[0], y[0], x[1], y[1], q[k / SPAN][i], q[k / SPAN][i + 1]);
    }
}

// What a plane of keys gives to S^T of a unit; ``added`` of both columns is what its zero points do. Codes are ``shift`` bits
// from where they are looked for.
template <bool OTHER>
DEVICE void score(
    float (&s)[TILES][4], float (&added)[SPANS][2], const u8 *stage, const u32 *query, u32 shift, int lane
) {
    using K = Keys<OTHER>;
    // a sign is a number less than a half of a scale beside nought
    constexpr bool affine = OTHER || KEY_AFFINE;
    constexpr int zeros = OTHER ? 0 : KEY_SPACE;
    const int g = lane >> 2, t = lane & 3;
    const u8 *codes_at = stage + (OTHER ? OTHER_CODES : KEY_CODES), *scales_at = stage + (OTHER ? OTHER_SCALES : KEY_SCALES);
    float even[SPANS][4], odd[SPANS][4];
#pragma unroll
    for (int i = 0; i < 4 * SPANS; i++) even[i / 4][i % 4] = odd[i / 4][i % 4] = 0;
#pragma unroll
    for (int j = 0; j < K::wide; j++) {
        u32 folded[SPANS][8], q[8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const Words w = read((const u8 *)(query + (2 * K::first + 8 * j + i) * 32 + lane * 4));
            q[i] = w.x, q[i + 1] = FOLDED ? w.y : w.z, q[i + 2] = FOLDED ? w.z : w.y, q[i + 3] = w.w;
        }
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
            if (!FOLDED) {
                const u8 *at = scales_at + span * K::line + (j * 64 + t * 16) * 2;
                const Words low = read(at), high = read(at + 16);
                const u32 scales[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                fold(folded[span], q, scales);
                if (affine) {
                    // four words as they come are an operand: of its products with two words of the query one half is wanted
                    const Words z = read(at + zeros), y = read(at + zeros + 16);
                    multiply(even[span], z.x, z.y, z.z, z.w, q[0], q[2]);
                    multiply(odd[span], z.x, z.y, z.z, z.w, q[1], q[3]);
                    multiply(even[span], y.x, y.y, y.z, y.w, q[4], q[6]);
                    multiply(odd[span], y.x, y.y, y.z, y.w, q[5], q[7]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) folded[span][i] = q[i];
            }
        }
        Words words[EIGHTS], signs[EIGHTS];
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const int at = (e * K::wide + j) * 512 + lane * 16;
            words[e] = read(codes_at + at);
            signs[e] = THREE ? read(stage + KEY_HIGHEST + at) : words[e];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 word[EIGHTS], sign[EIGHTS];
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                word[e] = OTHER ? word_of(words[e], i) >> shift : word_of(words[e], i);
                sign[e] = word_of(signs[e], i) >> shift;
            }
            multiply_words<OTHER>(s, word, sign, folded, 2 * i);
        }
    }
#pragma unroll
    for (int r = 0; r < K::narrow; r++) {
        u32 folded[SPANS][2];
        const Pair pair = read_pair((const u8 *)(query + 2 * (K::first + 4 * K::wide + r) * 32 + lane * 2));
        const u32 q[2] = {pair.x, pair.y};
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
            folded[span][0] = q[0], folded[span][1] = q[1];
            if (!FOLDED) {
                const u8 *at = scales_at + span * K::line + (K::wide * 64 + r * 16 + t * 4) * 2;
                const Pair of_scales = read_pair(at);
                const u32 scales[2] = {of_scales.x, of_scales.y};
                fold(folded[span], q, scales);
                if (affine) {
                    const Pair z = read_pair(at + zeros);
                    multiply_half(even[span], z.x, z.y, q[0]);
                    multiply_half(odd[span], z.x, z.y, q[1]);
                }
            }
        }
        u32 word[EIGHTS], sign[EIGHTS];
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const int at = K::wide * 64 * ROWS + ((e * 8 + g) * K::narrow + r) * 16 + t * 4;
            word[e] = read_word(codes_at + at);
            if (OTHER) word[e] >>= shift;
            sign[e] = THREE ? read_word(stage + KEY_HIGHEST + at) >> shift : 0;
        }
        multiply_words<OTHER>(s, word, sign, folded, 0);
    }
#pragma unroll
    for (int span = 0; span < SPANS; span++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float found = even[span][c] + odd[span][2 + c];
            added[span][c] = OTHER ? found * -0.5f : found;
        }
}

// S^T of a unit, and what zero points add to it.
DEVICE void scores(
    float (&s)[TILES][4], float (&added)[SPANS][2], const u8 *stage, const u32 *query, u32 shift, int lane
) {
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[k][i] = 0;
    float more[SPANS][2];
    if (OTHER_WIDTH) {
        score<true>(s, more, stage, query, shift, lane);
        // a sign stands at half the bit that a code of two bits does
#pragma unroll
        for (int k = 0; k < TILES; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[k][i] *= 1 << digit_of(2 * k + i / 2);
    }
    score<false>(s, added, stage, query, shift, lane);
    if (OTHER_WIDTH)
#pragma unroll
        for (int span = 0; span < SPANS; span++) added[span][0] += more[span][0], added[span][1] += more[span][1];
}

// Which tokens are there and seen; the others have no logit. ``left`` of the unit's tokens are stored, ``mask`` is for them.
DEVICE void hide(float (&s)[TILES][4], const Args &a, const u8 *mask, int first_row, int left, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 16 * k + g + i / 2 * 8;
            bool seen = token < left;
            if (MASKED) {
                const int query = first_row + 2 * t + i % 2;
                seen = seen && mask[SINGLE ? token : token + query % a.queries * a.mask_q] != 0;
            }
            if (!seen) s[k][i] = -number(0x7f800000u);
        }
}

// Whether every query sees all tokens of a unit that the lane looks at.
DEVICE bool all_seen(const Args &a, const u8 *mask, int left, int lane) {
    bool seen = true;
    for (int query = 0; query < (SINGLE ? 1 : a.queries); query++)
#pragma unroll
        for (int token = 0; token < UNIT; token += 32)
            if (token + lane < left) seen &= mask[query * a.mask_q + token + lane] != 0;
    return seen;
}

// Of tokens of a digit: what their logits are multiplied by for its place, and what is added to the exponents of their weights.
DEVICE constexpr int bits_before(int digit) { return BOOK ? 0 : digit * BITS; }
DEVICE constexpr float place_of(int eight) { return 1.f / (1 << bits_before(digit_of(eight))); }
DEVICE constexpr float lift_of(int eight) { return LIFT - bits_before(digit_of(eight)); }

// Exponents of weights, to base 2 and lifted, in the place of logits; whether one is too large.
DEVICE bool exponents(float (&x)[TILES][4], const State &state, const float (&factor)[2], const float (&added)[SPANS][2]) {
    bool grown = false;
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float lift = lift_of(2 * k + i / 2), above = added[k / SPAN][i % 2] - state.highest[i % 2];
            x[k][i] = x[k][i] * (factor[i % 2] * place_of(2 * k + i / 2)) + (above + lift);
            grown = grown | (x[k][i] > RISE + lift);
        }
    return grown;
}

// Raise the maximum to that of these logits, if it is larger, and rescale all that was found.
DEVICE void raise(State &state, const float (&s)[TILES][4], const float (&factor)[2], const float (&added)[SPANS][2]) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float top = state.highest[c];
#pragma unroll
        for (int k = 0; k < TILES; k++)
#pragma unroll
            for (int i = c; i < 4; i += 2)
                top = most(top, s[k][i] * (factor[c] * place_of(2 * k + i / 2)) + added[k / SPAN][c]);
        for (int step = 4; step < 32; step *= 2) top = most(top, from_other(top, step));
        const float shrink = exp2_of(state.highest[c] - top);
        state.highest[c] = top;
        for (int i = c; i < 4; i += 2) {
            state.sums[i] *= shrink;
#pragma unroll
            for (int j = 0; j < 2 * WORDS; j++) state.out[j][i] *= shrink;
        }
    }
}

// Weights of a unit as operands of P^T, from their exponents.
DEVICE void weigh(u32 (&p)[TILES][2], const float (&x)[TILES][4]) {
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int h = 0; h < 2; h++) p[k][h] = transposed(halves(exp2_of(x[k][2 * h]), exp2_of(x[k][2 * h + 1])));
}

// Scales or zero points of tokens 2t and 2t + 1 of every eight, a pair for every group of channels.
DEVICE void of_pairs(u32 (&out)[GROUPS], const u8 *stage, int eight, int t) {
    const u8 *at = stage + (eight * 8 + 2 * t) * GROUPS * 2;
    if (GROUPS == 4) {
        const Words w = read(at);
        out[0] = bytes(w.x, w.z, 0x5410), out[1] = bytes(w.x, w.z, 0x7632);
        out[GROUPS - 2] = bytes(w.y, w.w, 0x5410), out[GROUPS - 1] = bytes(w.y, w.w, 0x7632);
    } else if (GROUPS == 2) {
        const Pair w = read_pair(at);
        out[0] = bytes(w.x, w.y, 0x5410), out[GROUPS - 1] = bytes(w.x, w.y, 0x7632);
    } else {
        out[0] = read_word(at);
    }
}

// The zero points of tokens 2t and 2t + 1 in the group of the lane.
DEVICE u32 zeros_of(const u8 *stage, int eight, int g, int t) {
    const u8 *at = stage + (eight * 8 + 2 * t) * GROUPS * 2;
    if (GROUPS == 1) return read_word(at);
    // the word that has the group, of either token
    const u8 *word = at + (GROUPS == 4 ? (g & 2) * 2 : 0);
    return bytes(read_word(word), read_word(word + GROUPS * 2), g & 1 ? 0x7632 : 0x5410);
}

// Put what a span has found, codes and weights, to the rest, times the scales of channels.
DEVICE void close(State &state, const float (&found)[2 * WORDS][4], const float (&sums)[4], const u8 *stage, int span, int lane) {
    const u8 *at = stage + VALUE_SCALES + (span * WIDTH + (lane >> 2) * (WIDTH / 8)) * 2;
    const float weights[2] = {sums[0] * (1 / SMALLEST), sums[1] * (1 / SMALLEST)};
#pragma unroll
    for (int c = 0; c < 2; c++) state.sums[c] += sums[c];
#pragma unroll
    for (int j = 0; j < WORDS / 2; j++) {
        const Words scales = read(at + j * 16), zeros = VALUE_AFFINE ? read(at + j * 16 + VALUE_SPACE) : scales;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float x = found[4 * j + i][c], scale = half((u16)(word_of(scales, i) >> c / 2 * 16));
                // of three levels the one in the middle is nought
                state.out[4 * j + i][c] += scale * (VALUE_AFFINE ? x : x - weights[c % 2]);
                if (VALUE_AFFINE) state.out[4 * j + i][c] += half((u16)(word_of(zeros, i) >> c / 2 * 16)) * weights[c % 2];
            }
    }
}

// weights without the place of a digit
DEVICE u32 unplaced(u32 p, int digit) { return digit && !BOOK ? times(p, 0x3c003c00u + digit * BITS * 0x04000400u) : p; }

// Of both rows of a lane in eight rows of values the lower halves of its words, and the higher ones; a pair is a channel's.
DEVICE void value_words(u32 (&low)[WORDS], u32 (&high)[WORDS], const u8 *codes, int eight, int lane) {
    u32 x[2][WORDS];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u8 *at = codes + (eight * 2 + r) * 128 * WORDS + lane * 4 * WORDS;
        if (WORDS == 4) {
            const Words w = read(at);
#pragma unroll
            for (int i = 0; i < WORDS; i++) x[r][i] = word_of(w, i);
        } else {
            const Pair w = read_pair(at);
            x[r][0] = w.x, x[r][WORDS - 1] = w.y;
        }
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        low[i] = bytes(x[0][i], x[1][i], BOOK ? 0x5140 : 0x5410);
        high[i] = bytes(x[0][i], x[1][i], BOOK ? 0x7362 : 0x7632);
    }
}

// What the values of a unit add; the highest of three bits are ``shift`` bits from where they are looked for.
DEVICE void collect(State &state, const u32 (&p)[TILES][2], const u8 *stage, u32 shift, int lane) {
    const int g = lane >> 2, t = lane & 3;
    u32 low[EIGHTS][WORDS], high[EIGHTS][WORDS], low_sign[EIGHTS][WORDS], high_sign[EIGHTS][WORDS];
    float found[2 * WORDS][4], of_span[4];
    float (&out)[2 * WORDS][4] = GROUPED ? found : state.out, (&sums)[4] = GROUPED ? of_span : state.sums;
#pragma unroll
    for (int j = 0; j < APART; j++) {
        if (GROUPED && j % SPAN == 0)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[i] = 0;
#pragma unroll
                for (int c = 0; c < 2 * WORDS; c++) out[c][i] = 0;
            }
        const int first = rows_of(2 * j), second = rows_of(2 * j + 1);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int e = h ? second : first;
            // eights of rows come in order, each the first time with digit 0
            if (digit_of(2 * j + h) == 0) {
                value_words(low[e], high[e], stage + VALUE_CODES, e, lane);
                if (THREE) value_words(low_sign[e], high_sign[e], stage + VALUE_HIGHEST, e, lane);
#pragma unroll
                for (int i = 0; i < WORDS; i++) {
                    low_sign[e][i] = THREE ? low_sign[e][i] >> shift : 0;
                    high_sign[e][i] = THREE ? high_sign[e][i] >> shift : 0;
                }
            }
        }
        // weights of tiles times the scales of their tokens
        u32 weights[AT_ONCE][GROUPS][2];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int k = j + n * APART, d0 = digit_of(2 * k), d1 = digit_of(2 * k + 1);
            u32 z0 = 0, z1 = 0, scales0[GROUPS], scales1[GROUPS];
            if (!VALUE_BY_CHANNEL) {
                of_pairs(scales0, stage + VALUE_SCALES, 2 * k, t);
                of_pairs(scales1, stage + VALUE_SCALES, 2 * k + 1, t);
                if (VALUE_AFFINE) {
                    z0 = zeros_of(stage + VALUE_SCALES + VALUE_SPACE, 2 * k, g, t);
                    z1 = zeros_of(stage + VALUE_SCALES + VALUE_SPACE, 2 * k + 1, g, t);
                }
            }
            const u32 one = 0x3c003c00u;
            multiply(sums, one, z0, one, z1, unplaced(p[k][0], d0), unplaced(p[k][1], d1));
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                weights[n][group][0] = VALUE_BY_CHANNEL ? p[k][0] : times(p[k][0], scales0[group]);
                weights[n][group][1] = VALUE_BY_CHANNEL ? p[k][1] : times(p[k][1], scales1[group]);
            }
        }
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            u32 a[2][DIGITS][2], b[2][DIGITS][2];
            pairs(a[0], low[first][i], low_sign[first][i]), pairs(a[1], low[second][i], low_sign[second][i]);
            pairs(b[0], high[first][i], high_sign[first][i]), pairs(b[1], high[second][i], high_sign[second][i]);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const int k = j + n * APART;
                const u32 (&p)[2] = weights[n][i * GROUPS / WORDS];
                const u32 (&a0)[2] = a[0][digit_of(2 * k)], (&a1)[2] = a[1][digit_of(2 * k + 1)];
                const u32 (&b0)[2] = b[0][digit_of(2 * k)], (&b1)[2] = b[1][digit_of(2 * k + 1)];
                multiply(out[2 * i], a0[0], a0[1], a1[0], a1[1], p[0], p[1]);
                multiply(out[2 * i + 1], b0[0], b0[1], b1[0], b1[1], p[0], p[1]);
            }
        }
        if (GROUPED && (j + 1) % SPAN == 0) close(state, out, sums, stage, j / SPAN, lane);
    }
}

// --- the end of a run ------------------------------------------------------------------------------------------------
// What the warps of a block have found of pages that are read alike is put together in memory that is shared: numerators by
// column and channel, the largest logit and the sum of weights by column. What is there from runs before is added.
constexpr int FOUND = 8 * WIDTH + 16;
constexpr int SHARED = 4 * (STAGES * STAGE > FOUND * 4 ? STAGES * STAGE : FOUND * 4);

constexpr int QUERY = SHARED + (POOLED ? FOUND * 4 : 0);

DEVICE constexpr int channel_of_byte(int byte, int g) {
    const int each = WIDTH / GROUPS / 8;
    return byte / each * (WIDTH / GROUPS) + g * each + byte % each;
}

DEVICE void put(float *found, const State &state, const Args &a, i64 at, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const float lowered = 1.f / (1 << LIFT), unit = SMALLEST * lowered;
#pragma unroll
    for (int byte = 0; byte < 4 * WORDS; byte++) {
        const int channel = channel_of_byte(byte, g);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float x = state.out[byte / 2][byte % 2 * 2 + c] * unit;
            if (POOLED) {
                // scales of channels, of all tokens of the run
                x *= half(a.value_scale[at * WIDTH + channel]);
                if (VALUE_AFFINE) x += half(a.value_zero[at * WIDTH + channel]) * (state.sums[c] * lowered);
            } else if (VALUE_AFFINE && !GROUPED) {
                const int group = byte / 4 * GROUPS / WORDS;
                x += from_lane(state.sums[2 + c], group * 4 + t) * lowered;
            }
            found[(2 * t + c) * WIDTH + channel] = x;
        }
    }
    if (g == 0)
        for (int c = 0; c < 2; c++) {
            found[8 * WIDTH + 2 * t + c] = state.highest[c];
            found[8 * WIDTH + 8 + 2 * t + c] = state.sums[c] * lowered;
        }
}

// What the warps found and, but for the first run of a head, what is carried become what is carried or, after the last, the
// result.
DEVICE void merge(const float *found, float *carried, bool first, bool last, const Args &a, int first_row, i64 slot) {
    constexpr int EACH = 8 * WIDTH / 128;
    const int me = thread_again();
    float x[EACH], top[EACH], total[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = me + 128 * j, column = i / WIDTH, parts = first ? 4 : 5;
        top[j] = NONE, total[j] = 0, x[j] = 0;
        for (int k = 0; k < parts; k++) top[j] = most(top[j], (k < 4 ? found + k * FOUND : carried)[8 * WIDTH + column]);
        for (int k = 0; k < parts; k++) {
            const float *part = k < 4 ? found + k * FOUND : carried;
            const float weight = exp2_of(part[8 * WIDTH + column] - top[j]);
            total[j] += weight * part[8 * WIDTH + 8 + column];
            x[j] += weight * part[i];
        }
    }
    wait_for_block();
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = me + 128 * j, column = i / WIDTH, row = first_row + column;
        if (!last) {
            carried[i] = x[j];
            if (i % WIDTH == 0) carried[8 * WIDTH + column] = top[j], carried[8 * WIDTH + 8 + column] = total[j];
        } else if (row < a.rows) {
            const i64 at = slot * a.rows + row;
            a.part[at * WIDTH + i % WIDTH] = total[j] > 0 ? x[j] / total[j] : 0;
            if (i % WIDTH == 0) a.part_lse[at] = total[j] > 0 ? top[j] + log2_of(total[j]) : -number(0x7f800000u);
        }
    }
}

// --- a share of all pages --------------------------------------------------------------------------------------------
// The first page behind ``page`` that has other scales, or the last one; ``memory`` is for the threads to tell each other.
DEVICE int run_of(const Args &a, u8 *memory, int page, int last) {
    const int at = a.meta[a.table[page]];
    for (int next = page + 1; next < last; next += 128) {
        const int mine = next + thread(), there = at_most(last - next, 128);
        const bool same = thread() < there && a.meta[a.table[mine]] == at;
        memory[thread()] = same;
        const int count = count_of_block(same);
        int first = count;
        if (count < there)
            for (first = 0; memory[first]; first++) {}
        wait_for_block();
        if (count < there) return next + first;
    }
    return last;
}

// The head that owns a page.
DEVICE int owner(const Args &a, int page) {
    int head = 0, above = a.heads;
    while (above - head > 1) {
        const int middle = (head + above) / 2;
        if (a.cu_pages[middle] <= page) head = middle;
        else above = middle;
    }
    return head;
}

// Units of a head that are read alike; whether they are the first and the last of the head in this share.
struct Run { int head, first, stop; bool begins, ends; };

// Units ``first`` to ``last`` of a head, every fourth of them for a warp.
DEVICE void attend_units(
    State &state, u8 *ring, u32 *query, const Args &a, int head, int first_row, u32 first, u32 last
) {
    const int lane = thread() % 32, warp = thread() / 32, g = lane >> 2, t = lane & 3;
    float constant[2];
    const float by_row = load_query(query, constant, a, head, first_row, a.meta[a.table[first / UNITS]], lane);
    float unit[2], factor[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        unit[c] = from_lane(by_row, 8 * t + 4 * c);
        factor[c] = unit[c] * SMALLEST;
    }
    // every warp has written the same
    wait_for_block();

    const u32 mine = first + warp;
    Sources from = {
        codes_of<false>(a.key_codes, (const u8 *)(lane < 16 ? a.key_scale : a.key_zero), lane),
        codes_of<true>(a.other_codes, (const u8 *)a.other_scale, lane),
        a.value_codes + 2 * t * WIDTH + g * (WIDTH / 8),
        (const u8 *)(lane < 16 ? a.value_scale : a.value_zero) + lane % 16 * 16,
        a.count,
    };
    // where units are in their page: for all of a warp the same, if four are whole pages
    static_assert(4 % UNITS == 0, "");
    const u32 place = mine % UNITS;
    const u32 shift = place % TOGETHER * (UNIT / TILE);
    to_place(from, place);
    // pages come from the table two units before they are copied, and their scales one
    u32 index = 0, next = 0, at = 0;
    if (mine < last) {
        index = a.table[mine / UNITS], next = a.table[at_most(mine + 4, last - 1) / UNITS];
        if (!POOLED) at = a.meta[index];
    }
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) {
        if (mine + 4 * i < last) {
            issue(ring + i * STAGE, from, index, at, lane);
            index = next;
            if (!POOLED) at = a.meta[index];
            next = a.table[at_most(mine + 4 * (i + 2), last - 1) / UNITS];
        }
        copies_end();
    }
    int slot = 0;
    u32 now = mine;
    const u8 *mask = a.mask + head / a.kv_heads * a.mask_b + head % a.kv_heads * a.mask_h + place * UNIT;
    if (MASKED) keep(mask);
    // logits of a unit but for place and query, and what is to be added to them
    const auto score_unit = [&](float (&s)[TILES][4], float (&sums)[SPANS][2], const u8 *stage) {
        scores(s, sums, stage, query, shift, lane);
#pragma unroll
        for (int span = 0; span < SPANS; span++)
#pragma unroll
            for (int c = 0; c < 2; c++) sums[span][c] = FOLDED ? constant[c] : sums[span][c] * unit[c];
        if (!KEY_BY_CHANNEL) {
#pragma unroll
            for (int k = 0; k < TILES; k++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float scale = half(*(const u16 *)(stage + KEY_SCALES + (16 * k + 8 * h + g) * 2));
                    s[k][2 * h] *= scale, s[k][2 * h + 1] *= scale;
                }
        }
    };
    // weights and values of a unit, and its place for the next one
    const auto finish_unit = [&](u8 *stage, float (&x)[TILES][4]) {
        u32 p[TILES][2];
        weigh(p, x);
        collect(state, p, stage, shift, lane);
        wait_for_warp();
        if (now + 4 * STAGES < last) issue(stage, from, index, at, lane);
        copies_end();
        index = next;
        if (!POOLED) at = a.meta[index];
        next = a.table[at_most(now + 4 * (STAGES + 2), last - 1) / UNITS];
        now += 4;
        slot = slot == (STAGES - 1) * STAGE ? 0 : slot + STAGE;
    };
    while (now < last) {
        // what stands here keeps this loop and the one inside apart
        wait_for_warp();
        while (now < last) {
            wait_for_copies<STAGES - 1>();
            wait_for_warp();
            u8 *stage = ring + slot;
            const int left = *(const int *)(stage + COUNT) - (int)place * UNIT;
            bool rare = left < UNIT;
            if (MASKED) rare = rare || !all_seen(a, mask + a.columns[now / UNITS], left, lane);
            float x[TILES][4], sums[SPANS][2];
            score_unit(x, sums, stage);
            rare = exponents(x, state, factor, sums) | rare;
            if (any(rare)) break;
            finish_unit(stage, x);
        }
        if (now < last) {
            // once more where tokens are hidden, or the maximum has to be raised
            u8 *stage = ring + slot;
            const int left = *(const int *)(stage + COUNT) - (int)place * UNIT;
            float x[TILES][4], sums[SPANS][2];
            score_unit(x, sums, stage);
            hide(x, a, MASKED ? mask + a.columns[now / UNITS] : nullptr, first_row, left, lane);
            raise(state, x, factor, sums);
            exponents(x, state, factor, sums);
            finish_unit(stage, x);
        }
    }
    wait_for_copies<0>();
}

KERNEL attend(const Args a) {
    u8 *memory = shared_memory();
    float *found = (float *)memory, *carried = (float *)(memory + SHARED);
    u32 *query = (u32 *)(memory + QUERY);
    // what is only needed between runs is not kept in registers
    Run *run = (Run *)(memory + QUERY + 256 * KEY_WORDS);
    const int units = a.cu_pages[a.heads] * UNITS, share = (units + blocks() - 1) / blocks();
    int first = block(0) * share;
    if (first >= units) return;
    int head = owner(a, first / UNITS);
    bool begins = true;
    while (first < at_most((block(0) + 1) * share, units)) {
        const int end = at_most(a.cu_pages[head + 1] * UNITS, at_most((block(0) + 1) * share, units));
        if (first >= end) {
            head++;
            continue;
        }
        const int stop = POOLED ? at_most(run_of(a, memory, first / UNITS, (end + UNITS - 1) / UNITS) * UNITS, end) : end;
        if (thread() == 0) *run = {head, first, stop, begins, stop == end};
        State state;
        state.highest[0] = state.highest[1] = NONE;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            state.sums[i] = 0;
#pragma unroll
            for (int j = 0; j < 2 * WORDS; j++) state.out[j][i] = 0;
        }
        attend_units(state, memory + thread() / 32 * (STAGES * STAGE), query, a, head, block(1) * 8, first, stop);
        wait_for_block();
        const int me = thread_again();
        put(found + me / 32 * FOUND, state, a, POOLED ? a.meta[a.table[run->first / UNITS]] : 0, me % 32);
        wait_for_block();
        head = run->head, first = run->stop;
        merge(found, carried, run->begins, run->ends, a, block(1) * 8, (i64)block(0) + head);
        begins = run->ends;
        wait_for_block();
    }
}
