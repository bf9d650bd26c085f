// A block of 128 threads on the CPU, for paged.cu: its section "instructions" once more, in plain C++.
//
// Every thread is a fibre that runs until it meets an instruction of its whole warp (or block) and then waits for the others, so
// nothing that is exchanged is seen earlier than there. Fragments of matrices lie as the PTX manual says (mma.m16n8k16, movmatrix).
// An asynchronous copy is made when it is waited for, and not before.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <ucontext.h>

typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
typedef long long i64;
typedef unsigned long long u64;
#define ON_HOST
#define DEVICE static inline
#define KERNEL static void

namespace machine {
struct Copy {
    u8 *to;
    const u8 *from;
    int bytes;
};
struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 18);
    bool done = false;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    unsigned meetings[2] = {0, 0};  // with its warp, with its block
};
static Fibre fibres[128];
static ucontext_t home;
static int current, at[2], grid;
static std::vector<u8> memory;
static unsigned arrived[5];
static u32 exchanged[2][128][6];
static const void *arguments;
static void (*kernel)();

static void next() {
    const int from = current;
    for (int i = 1; i <= 128; i++) {
        const int to = (from + i) % 128;
        if (fibres[to].done) continue;
        if (to == from) return;
        current = to;
        swapcontext(&fibres[from].context, &fibres[to].context);
        return;
    }
    swapcontext(&fibres[from].context, &home);
}

static void meet(bool of_block) {
    const int who = of_block ? 4 : current / 32, size = of_block ? 128 : 32;
    const unsigned all = ++fibres[current].meetings[of_block] * size;
    arrived[who]++;
    for (int turns = 0; (int)(arrived[who] - all) < 0; turns++) {
        if (turns > 1000000) fprintf(stderr, "threads wait for each other\n"), abort();
        next();
    }
}

// what every lane of a warp has put there
static u32 (*exchange(const u32 *mine, int count))[6] {
    Fibre &me = fibres[current];
    const int buffer = me.meetings[0] & 1;
    memcpy(exchanged[buffer][current], mine, 4 * count);
    meet(false);
    return exchanged[buffer] + current / 32 * 32;
}

static float as_float(u16 x) {
    const u32 size = x & 0x7fff;
    float y;
    if (size >= 0x7c00) y = size > 0x7c00 ? NAN : INFINITY;
    else if (size < 0x400) y = size * 0x1p-24f;
    else { const u32 wide = (size << 13) + (112 << 23); memcpy(&y, &wide, 4); }
    return x & 0x8000 ? -y : y;
}

static u16 as_half(float x) {
    const u16 sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    if (std::isnan(size)) return 0x7fff;
    if (size >= 65520.f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (u16)std::nearbyint(size * 0x1p24f);
    int exponent;
    const float mantissa = std::frexp(size, &exponent);
    // 11 bits, rounded half to even; a carry goes to the exponent
    return sign | (u16)(((exponent + 14) << 10) + (int)std::nearbyint(mantissa * 2048) - 1024);
}

static void entry() {
    kernel();
    fibres[current].done = true;
    next();
}

static void run(void (*which)(), int x, int y, int blocks, size_t shared) {
    kernel = which, at[0] = x, at[1] = y, grid = blocks;
    memory.assign(shared + 16, 0xcd);
    memset(arrived, 0, sizeof arrived);
    for (int i = 0; i < 128; i++) {
        Fibre &one = fibres[i];
        one.done = false, one.groups.clear(), one.open.clear(), one.meetings[0] = one.meetings[1] = 0;
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size();
        one.context.uc_link = &home;
        makecontext(&one.context, entry, 0);
    }
    current = 0;
    swapcontext(&home, &fibres[0].context);
}
}  // namespace machine

DEVICE int thread() { return machine::current; }
DEVICE int thread_again() { return thread(); }
DEVICE int block(int axis) { return machine::at[axis]; }
DEVICE int blocks() { return machine::grid; }
DEVICE u8 *shared_memory() { return (u8 *)(((uintptr_t)machine::memory.data() + 15) & ~(uintptr_t)15); }
DEVICE void wait_for_block() { machine::meet(true); }
DEVICE void wait_for_warp() { machine::meet(false); }
DEVICE u32 bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }
DEVICE float number(u32 x) { float y; memcpy(&y, &x, 4); return y; }
DEVICE bool any(bool x) {
    const u32 mine = x;
    u32 (*all)[6] = machine::exchange(&mine, 1), found = 0;
    for (int i = 0; i < 32; i++) found |= all[i][0];
    return found;
}
DEVICE int count_of_block(bool x) {
    static int count;
    machine::meet(true);
    if (thread() == 0) count = 0;
    machine::meet(true);
    count += x;
    machine::meet(true);
    return count;
}
DEVICE float from_lane(float x, int lane) {
    const u32 mine = bits(x);
    return number(machine::exchange(&mine, 1)[lane][0]);
}
DEVICE float from_other(float x, int mask) { return from_lane(x, machine::current % 32 ^ mask); }
template <int BYTES> DEVICE void copy(u8 *to, const void *from) {
    if (((uintptr_t)to | (uintptr_t)from) % BYTES) fprintf(stderr, "a copy of %d bytes is not aligned\n", BYTES), abort();
    machine::fibres[machine::current].open.push_back({to, (const u8 *)from, BYTES});
}
DEVICE void copies_end() {
    machine::Fibre &me = machine::fibres[machine::current];
    me.groups.push_back(me.open);
    me.open.clear();
}
template <int LEFT> DEVICE void wait_for_copies() {
    auto &groups = machine::fibres[machine::current].groups;
    while ((int)groups.size() > LEFT) {
        for (auto &one : groups.front()) memcpy(one.to, one.from, one.bytes);
        groups.erase(groups.begin());
    }
}
template <int K> DEVICE void product(float (&d)[4], const u32 (&mine)[6]) {
    u32 (*all)[6] = machine::exchange(mine, 6);
    const int lane = machine::current % 32;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < K; k++) {
            const u32 a = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], b = all[column * 4 + k % 8 / 2][4 + k / 8];
            sum += machine::as_float(a >> k % 2 * 16) * machine::as_float(b >> k % 2 * 16);
        }
        d[i] += sum;
    }
}
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { product<16>(d, {a0, a1, a2, a3, b0, b1}); }
DEVICE void multiply_half(float (&d)[4], u32 a0, u32 a1, u32 b) { product<8>(d, {a0, a1, 0, 0, b, 0}); }
DEVICE u32 transposed(u32 x) {
    u32 (*all)[6] = machine::exchange(&x, 1);
    const int row = machine::current % 32 / 4, column = machine::current % 4 * 2;
    const u32 low = all[column * 4 + row / 2][0] >> row % 2 * 16, high = all[column * 4 + 4 + row / 2][0] >> row % 2 * 16;
    return (low & 0xffff) | high << 16;
}
DEVICE float exp2_of(float x) { return std::exp2(x); }
DEVICE float log2_of(float x) { return std::log2(x); }
DEVICE u32 halves(float low, float high) { return machine::as_half(low) | (u32)machine::as_half(high) << 16; }
DEVICE float half(u16 x) { return machine::as_float(x); }
DEVICE u32 times(u32 x, u32 y) { return halves(half(x) * half(y), half(x >> 16) * half(y >> 16)); }
DEVICE u32 bytes(u32 x, u32 y, u32 which) {
    const uint64_t both = (uint64_t)y << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
DEVICE void keep(const u8 *&) {}

#include SOURCE

extern "C" int shared_bytes() { return QUERY + 256 * KEY_WORDS + 16; }
extern "C" void run(const Args *arguments, int x, int y) {
    machine::arguments = arguments;
    for (int j = 0; j < y; j++)
        for (int i = 0; i < x; i++)
            machine::run([] { attend(*(const Args *)machine::arguments); }, i, j, x, shared_bytes());
}
