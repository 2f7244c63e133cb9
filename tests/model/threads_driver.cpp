// Ranks as threads over one mapping, held up where a schedule says, every row and every sum compared bit for bit.
//
// stdin:  protocol, then "name number" pairs up to "end" (the shape, num_slots, rounds, limit_ms, and the layout's
//         offsets), then one schedule a line: "rank step microseconds seed". Step "any": every rank is held up at
//         random places, for at most that long.
// stdout: rounds verified. Exit status 1 with a sentence on stderr at the first difference or expired wait.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

enum class Step {
    begin, record, part, header, announce, rearm_partials, await, experts, combine, rearm_records, await_combine, sum,
    any
};
void hold_up(Step step);
#define EPCROSS_STEP(step) hold_up(Step::step)

#include "fence.hpp"
#include "sentinel.hpp"
#include "two_sided.hpp"

using namespace epcross;

constexpr const char* kSteps[] = {"begin",   "record",  "part",          "header",        "announce",
                                  "rearm_partials", "await", "experts", "combine", "rearm_records",
                                  "await_combine", "sum", "any"};

struct Schedule {
    std::uint32_t rank = 0;
    Step step = Step::any;
    std::uint32_t microseconds = 0, seed = 0;
};

thread_local const Schedule* my_schedule = nullptr;
thread_local std::uint32_t my_rank = 0;
thread_local std::minstd_rand my_random;

void hold_up(Step step) {
    const Schedule& schedule = *my_schedule;
    std::uint32_t microseconds = schedule.microseconds;
    if (schedule.step == Step::any) {
        if (my_random() % 6 != 0) return;
        microseconds = my_random() % (microseconds + 1);
    } else if (schedule.step != step || schedule.rank != my_rank) {
        return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

struct Case {
    Shape shape;
    Layout layout;
    std::size_t total_bytes = 0;
    std::uint32_t num_slots = 0, rounds = 0;
    double limit_s = 0;
    std::vector<std::int32_t> slot_rank;
};

/// The inputs of one rank in one round; every rank can make those of all.
struct Inputs {
    std::uint32_t tokens;
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    std::vector<Byte> rows, scales;

    Inputs(const Case& c, std::uint32_t seed, std::uint32_t round, std::uint32_t rank) {
        std::seed_seq mix{seed, round, rank};
        std::mt19937_64 random(mix);
        // none at all now and then, and all that fit
        tokens = static_cast<std::uint32_t>(std::min<std::uint64_t>(random() % (c.shape.capacity + 2), c.shape.capacity));
        if (random() % 4 == 0) tokens = 0;
        for (std::size_t i = 0; i < std::size_t{tokens} * c.shape.top_k; ++i) {
            ids.push_back(random() % 4 == 0 ? -1 : static_cast<std::int32_t>(random() % c.num_slots));
            weights.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random() % 3 ? random() : kArmed)));
        }
        fill(rows, tokens * c.layout.row_bytes(), random);
        fill(scales, tokens * c.layout.scale_bytes(), random);
    }

    static void fill(std::vector<Byte>& to, std::size_t bytes, std::mt19937_64& random) {
        to.resize(bytes);
        const bool armed = random() % 2;
        for (std::size_t at = 0; at < bytes; at += sizeof(Word)) {
            const Word word = armed && random() % 4 == 0 ? kArmed : random();
            std::memcpy(to.data() + at, &word, sizeof word);
        }
    }
    bool goes(const Case& c, std::uint32_t token, std::uint32_t rank) const {
        for (std::uint32_t k = 0; k < c.shape.top_k; ++k) {
            const std::int32_t id = ids[std::size_t{token} * c.shape.top_k + k];
            if (id >= 0 && c.slot_rank[static_cast<std::size_t>(id)] == static_cast<std::int32_t>(rank)) return true;
        }
        return false;
    }
};

/// What rank `from` returns for a token: any bits, at times words that equal the sentinel.
std::vector<std::uint16_t> partial_of(const Case& c, std::uint32_t seed, std::uint32_t round, std::uint32_t from,
                                      std::uint32_t source, std::uint32_t token) {
    std::seed_seq mix{seed, round, from, source, token, 1u};
    std::mt19937_64 random(mix);
    std::vector<std::uint16_t> values(c.layout.partial_bytes / sizeof(std::uint16_t));
    for (std::size_t i = 0; i < values.size(); i += 4) {
        const Word word = random() % 16 == 0 ? kArmed : random() & 0xBFFF'BFFF'BFFF'BFFFull;  // finite
        std::memcpy(&values[i], &word, sizeof word);
    }
    return values;
}

struct Difference : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void require_equal(const void* is, const void* should, std::size_t bytes, const char* what, std::uint32_t rank,
                   std::uint32_t round) {
    if (bytes && std::memcmp(is, should, bytes) != 0) {
        throw Difference("rank " + std::to_string(rank) + ", round " + std::to_string(round) + ": other " + what);
    }
}

template <typename Protocol>
void run_rounds(const Case& c, Protocol& exchange, std::uint32_t rank, const Schedule& schedule) {
    const std::size_t top_k = c.shape.top_k, hidden = c.shape.hidden, values = c.layout.partial_bytes / 2;
    for (std::uint32_t round = 0; round < c.rounds; ++round) {
        std::vector<Inputs> inputs;
        for (std::uint32_t r = 0; r < c.shape.ep_size; ++r) inputs.emplace_back(c, schedule.seed, round, r);
        const Inputs& mine = inputs[rank];
        exchange.dispatch({mine.tokens, mine.ids.data(), mine.weights.data(), mine.rows.data(), mine.scales.data()});

        std::vector<std::int32_t> source, token, ids;
        std::vector<float> weights;
        std::vector<Byte> rows, scales;
        std::vector<std::uint16_t> staged;
        const auto append = [](auto& to, const auto& from, std::size_t at, std::size_t count) {
            to.insert(to.end(), from.begin() + static_cast<std::ptrdiff_t>(at),
                      from.begin() + static_cast<std::ptrdiff_t>(at + count));
        };
        for (std::uint32_t s = 0; s < c.shape.ep_size; ++s) {
            for (std::uint32_t t = 0; t < inputs[s].tokens; ++t) {
                if (!inputs[s].goes(c, t, rank)) continue;
                source.push_back(static_cast<std::int32_t>(s)), token.push_back(static_cast<std::int32_t>(t));
                append(ids, inputs[s].ids, t * top_k, top_k), append(weights, inputs[s].weights, t * top_k, top_k);
                append(rows, inputs[s].rows, t * c.layout.row_bytes(), c.layout.row_bytes());
                append(scales, inputs[s].scales, t * c.layout.scale_bytes(), c.layout.scale_bytes());
                append(staged, partial_of(c, schedule.seed, round, rank, s, t), 0, values);
            }
        }
        if (exchange.rows() != source.size()) throw Difference("rank " + std::to_string(rank) + ": other row count");
        const std::size_t n = source.size();
        std::vector<std::int32_t> got_source(n), got_token(n), got_ids(n * top_k);
        std::vector<float> got_weights(n * top_k);
        std::vector<Byte> got_rows(rows.size()), got_scales(scales.size());
        exchange.copy_received({got_source.data(), got_token.data(), got_ids.data(), got_weights.data(),
                                got_rows.data(), got_scales.data()});
        require_equal(got_source.data(), source.data(), n * sizeof(std::int32_t), "sources", rank, round);
        require_equal(got_token.data(), token.data(), n * sizeof(std::int32_t), "tokens", rank, round);
        require_equal(got_ids.data(), ids.data(), n * top_k * sizeof(std::int32_t), "ids", rank, round);
        require_equal(got_weights.data(), weights.data(), n * top_k * sizeof(float), "weights", rank, round);
        require_equal(got_rows.data(), rows.data(), rows.size(), "rows", rank, round);
        require_equal(got_scales.data(), scales.data(), scales.size(), "scales", rank, round);

        exchange.experts(reinterpret_cast<const Byte*>(staged.data()));
        std::vector<std::uint16_t> out(mine.tokens * hidden), should;
        exchange.combine(out.data());
        for (std::uint32_t t = 0; t < mine.tokens; ++t) {
            std::vector<float> sums(hidden, 0.0f);
            for (std::uint32_t from = 0; from < c.shape.ep_size; ++from) {
                if (!mine.goes(c, t, from)) continue;
                const auto partial = partial_of(c, schedule.seed, round, from, rank, t);
                for (std::size_t i = 0; i < hidden; ++i) sums[i] += bf16_to_float(partial[i]);
            }
            for (const float sum : sums) should.push_back(float_to_bf16(sum));
        }
        require_equal(out.data(), should.data(), out.size() * sizeof(std::uint16_t), "sums", rank, round);
    }
}

template <typename Protocol>
std::string run_schedule(const Case& c, const Schedule& schedule) {
    struct Free {
        void operator()(Byte* at) const { std::free(at); }
    };
    std::vector<std::unique_ptr<Byte, Free>> memory;
    std::vector<Byte*> base;
    for (std::uint32_t rank = 0; rank < c.shape.ep_size; ++rank) {
        memory.emplace_back(static_cast<Byte*>(std::aligned_alloc(4096, (c.total_bytes + 4095) / 4096 * 4096)));
        base.push_back(memory.back().get());
    }
    std::vector<std::unique_ptr<Protocol>> exchanges;
    for (std::uint32_t rank = 0; rank < c.shape.ep_size; ++rank) {
        Shape shape = c.shape;
        shape.rank = rank;
        const Patience patience{.limit_s = c.limit_s, .spins_before_yield = 16};
        exchanges.push_back(std::make_unique<Protocol>(Workspaces{shape, c.layout, base}, c.slot_rank, patience));
        exchanges.back()->start(0xFFFF'FFFEu);  // epochs wrap in the third round
    }
    std::mutex guard;
    std::string failure;
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < c.shape.ep_size; ++rank) {
        threads.emplace_back([&, rank] {
            my_schedule = &schedule;
            my_rank = rank;
            my_random.seed(schedule.seed * 64 + rank + 1);
            try {
                run_rounds(c, *exchanges[rank], rank, schedule);
            } catch (const std::runtime_error& error) {
                const std::lock_guard lock(guard);
                if (failure.empty()) failure = error.what();
            }
        });
    }
    for (auto& thread : threads) thread.join();
    return failure;
}

int main() {
    std::string protocol, name;
    std::cin >> protocol;
    std::map<std::string, std::size_t> numbers;
    while (std::cin >> name && name != "end") std::cin >> numbers[name];
    const auto number = [&](const std::string& key) {
        const auto found = numbers.find(key);
        return found == numbers.end() ? std::size_t{0} : found->second;  // a region that this protocol does not have
    };
    const auto small = [&](const char* key) { return static_cast<std::uint32_t>(numbers.at(key)); };

    Case c;
    c.shape = {0, small("ep_size"), small("capacity"), small("top_k"), small("hidden")};
    c.total_bytes = numbers.at("total_bytes");
    c.num_slots = small("num_slots"), c.rounds = small("rounds"), c.limit_s = small("limit_ms") / 1000.0;
    for (std::uint32_t slot = 0; slot < c.num_slots; ++slot) {
        c.slot_rank.push_back(static_cast<std::int32_t>(slot % c.shape.ep_size));
    }
    Layout& at = c.layout;
    at.scale_at = number("scale_at"), at.ids_at = number("ids_at"), at.weights_at = number("weights_at");
    at.header_at = number("header_at"), at.record_bytes = number("record_bytes");
    at.escape_bytes = number("escape_bytes"), at.partial_bytes = number("partial_bytes");
    at.control = number("control"), at.count_flags = number("count_flags");
    at.dispatch_flags = number("dispatch_flags"), at.combine_flags = number("combine_flags");
    for (const int set : {0, 1}) {
        const bool sentinel = protocol == "sentinel";
        const std::string of_set = sentinel ? "_" + std::to_string(set) : "";
        at.records[set] = number("records" + of_set), at.partials[set] = number("partials" + of_set);
        at.counts[set] = number("counts" + of_set), at.escapes[set] = number("escapes" + of_set);
    }

    std::size_t rounds = 0;
    Schedule schedule;
    while (std::cin >> schedule.rank >> name >> schedule.microseconds >> schedule.seed) {
        const auto* step = std::find(std::begin(kSteps), std::end(kSteps), name);
        if (step == std::end(kSteps)) {
            std::fprintf(stderr, "no step is called %s\n", name.c_str());
            return 2;
        }
        schedule.step = static_cast<Step>(step - std::begin(kSteps));
        const std::string failure = protocol == "fence"      ? run_schedule<Fence>(c, schedule)
                                    : protocol == "sentinel" ? run_schedule<Sentinel>(c, schedule)
                                                             : run_schedule<TwoSided>(c, schedule);
        if (!failure.empty()) {
            std::fprintf(stderr, "rank %u held up at %s: %s\n", schedule.rank, name.c_str(), failure.c_str());
            return 1;
        }
        rounds += c.rounds;
    }
    std::printf("%zu\n", rounds);
    return 0;
}
