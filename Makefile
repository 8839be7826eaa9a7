# make            build bin/sluice
# make demo       set up, build, and run the smallest model end to end
# make test       set up, then all tests (check and check-e2e, in every configuration)
# make help       the other targets
CONFIG ?= release
B := build/$(CONFIG)
PREFIX ?= /usr/local
CFLAGS ?= -O2 -g
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Werror
OPT.release :=
OPT.clang :=
OPT.arm64 :=
OPT.asan := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT.tsan := -O1 -fsanitize=thread
OPT.fuzz := $(OPT.asan) -fsanitize=fuzzer-no-link
$(if $(filter $(CONFIG),release clang arm64 asan tsan fuzz),,$(error unknown CONFIG=$(CONFIG)))
ifneq ($(filter $(CONFIG),clang fuzz),)
CC := clang
endif
PKG_CONFIG := pkg-config
ifeq ($(CONFIG),arm64)
CC := aarch64-linux-gnu-gcc
PKG_CONFIG := PKG_CONFIG_LIBDIR=/usr/lib/aarch64-linux-gnu/pkgconfig pkg-config
endif
ARCH := $(shell $(CC) -dumpmachine 2>/dev/null)
# MUST follows CFLAGS, at link too: a caller cannot change results by accident.
MUST := -std=c11 -D_GNU_SOURCE -Iinclude -Isrc -ffp-contract=off -fno-fast-math -fvisibility=hidden -pthread -MMD -MP
PKGS := liburing jansson libpcre2-8 libcrypto
# Asked once, when something is first compiled, so that `make deps` works before the packages are there.
PKG_CFLAGS = $(eval PKG_CFLAGS := $$(shell $(PKG_CONFIG) --cflags $(PKGS)))$(PKG_CFLAGS)
PKG_LIBS = $(eval PKG_LIBS := $$(shell $(PKG_CONFIG) --libs $(PKGS)) -lm)$(PKG_LIBS)

PARTS := base kernels store text model gen proof
TESTS := unit kernels golden prop
ifeq ($(CONFIG)$(shell $(PKG_CONFIG) --exists $(PKGS) 2>/dev/null || echo -none),arm64-none)
# A cross compiler without the libraries: what needs none of them.
PARTS := base kernels
TESTS := kernels
PKG_CFLAGS := -DWITHOUT_LIBRARIES
PKG_LIBS := -lm
endif
SRC := $(wildcard $(PARTS:%=src/%/*.c)) $(if $(filter model,$(PARTS)),$(wildcard src/*.c))
SRC += $(if $(filter x86_64%,$(ARCH)),$(wildcard src/kernels/x86/*.c))
SRC += $(if $(filter aarch64%,$(ARCH)),$(wildcard src/kernels/arm/*.c))
CMD_SRC := $(wildcard cmd/*.c)
OBJ := $(SRC:%.c=$(B)/%.o)
CMD_OBJ := $(CMD_SRC:%.c=$(B)/%.o)
LIB := $(B)/libsluice.a
TEST_SRC := $(wildcard $(TESTS:%=tests/%/test_*.c))
TEST_BIN := $(TEST_SRC:%.c=$(B)/%)
FUZZ := $(if $(filter model,$(PARTS)),$(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c)))
REPLAY := $(FUZZ:%=$(B)/tests/fuzz/replay_%)
LINK = $(CC) $(CFLAGS) $(OPT.$(CONFIG)) $(MUST) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) $(PKG_LIBS) -o $@

all: $(if $(filter release,$(CONFIG)),bin/sluice,$(B)/sluice)
bin/sluice: build/release/sluice
	@mkdir -p bin
	cp $< $@
$(B)/sluice: $(CMD_OBJ) $(LIB)
	$(LINK)
$(LIB): $(OBJ)
	@rm -f $@
	$(AR) rcs $@ $^

$(B)/src/kernels/x86/avx2.o: ISA := -mavx2 -mfma -mf16c
$(B)/src/kernels/x86/avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
$(B)/%.o: %.c Makefile
	@mkdir -p $(@D)
	$(CC) $(WARN) $(CFLAGS) $(OPT.$(CONFIG)) $(ISA) $(PKG_CFLAGS) $(MUST) -c $< -o $@

# ---- tests: each tests/<kind>/test_*.c is a program of its own ------------------------------
$(B)/tests/%.o: MUST += -I.
$(B)/tests/%: $(B)/tests/%.o $(LIB)
	$(LINK)
$(B)/tests/unit/test_cmd: $(B)/cmd/cmd.o
$(B)/tests/fuzz/replay_%: $(B)/tests/fuzz/fuzz_%.o $(B)/tests/fuzz/replay.o $(LIB)
	$(LINK)
$(B)/tests/fuzz/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(LIB)
	$(LINK) -fsanitize=fuzzer
# What tests/run is given for this CONFIG; NAME=VALUE sets the environment of the tests after it.
# SL_QUICK: a slow build or machine, so exhaustive tests may sample.
CLI := $(wildcard tests/cli/test_*.sh)
SCRIPTS := scripts/include-order scripts/check-headers scripts/check-docs scripts/check-size
RUN := SL_QUICK=1 $(TEST_BIN) $(REPLAY) SLUICE=$(B)/sluice $(CLI)
RUN.release := SLUICE=bin/sluice $(TEST_BIN) $(REPLAY) $(SCRIPTS) $(CLI)
# The loader must be of the same libc as the libraries: the arm64 packages' own, where they are installed.
ARM64_ROOT := $(if $(wildcard /lib/ld-linux-aarch64.so.1),/,/usr/aarch64-linux-gnu)
# Without the two that take minutes under an emulator and hold nothing of the instruction set.
RUN.arm64 := SL_QUICK=1 EMULATOR=qemu-aarch64 QEMU_LD_PREFIX=$(ARM64_ROOT) \
    $(filter-out %/test_io %/test_tokenizer_linear,$(TEST_BIN)) EMULATOR=
RUN.e2e := SL_QUICK= SLUICE=bin/sluice $(wildcard tests/e2e/test_*.sh)
RUN_CONFIG = $(or $(RUN.$(CONFIG)),$(RUN))
NEEDS.clang := clang
NEEDS.arm64 := aarch64-linux-gnu-gcc qemu-aarch64

tests: $(TEST_BIN) $(REPLAY) $(if $(filter model,$(PARTS)),all)
tests-list:
	@echo $(RUN_CONFIG)
check: tests
	tests/run $(RUN_CONFIG)
check-san:
	$(MAKE) CONFIG=asan check
check-clang check-arm64: check-%:
	$(MAKE) CONFIG=$* check
check-e2e: all
	tests/run $(RUN.e2e)

# One run over all configurations, so that the counts at its end are the sum.
J = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))
test:
	scripts/deps test
	@set -e; list=; for c in release asan clang arm64; do \
	    need=$$($(MAKE) -s CONFIG=$$c needs); \
	    if command -v $$need >/dev/null; then \
	        $(MAKE) $(J) CONFIG=$$c tests; list="$$list $$($(MAKE) -s CONFIG=$$c tests-list)"; \
	    else list="$$list skip:build/$$c"; fi; done; \
	tests/run $$list $(RUN.e2e)
needs:
	@echo $(or $(NEEDS.$(CONFIG)),make)
demo:
	scripts/deps build
	$(MAKE) $(J) all
	scripts/demo

# ---- analysis, fuzzing ----------------------------------------------------------------------
LINT := $(patsubst %.c,build/lint/%.tidy,$(SRC) $(CMD_SRC))
lint: $(LINT)
	cppcheck --quiet --std=c11 --enable=warning,performance,portability --inline-suppr \
	    --error-exitcode=1 --suppress=missingIncludeSystem -Iinclude -Isrc src cmd
build/lint/src/kernels/x86/avx2.tidy: ISA := -mavx2 -mfma -mf16c
build/lint/src/kernels/x86/avx512.tidy: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
build/lint/%.tidy: %.c .clang-tidy $(wildcard include/*.h src/*/*.h cmd/*.h)
	@mkdir -p $(@D)
	@clang-tidy --quiet $< -- $(ISA) $(PKG_CFLAGS) $(filter-out -MMD -MP,$(MUST)) >$@ 2>&1 || \
	    { grep error: $@; false; }
fuzz: SECONDS ?= 60
fuzz:
	$(if $(T),,$(error usage: make fuzz T=NAME [SECONDS=60]; NAME is one of $(FUZZ)))
	$(MAKE) CONFIG=fuzz build/fuzz/tests/fuzz/fuzz_$(T)
	@mkdir -p build/fuzz/corpus/$(T)
	build/fuzz/tests/fuzz/fuzz_$(T) -max_total_time=$(SECONDS) -artifact_prefix=build/fuzz/$(T)- \
	    build/fuzz/corpus/$(T) tests/fuzz/corpus/$(T)

# ---- the rest -------------------------------------------------------------------------------
VERSION = $(shell sed -n 's/^.define SL_VERSION "\(.*\)"/\1/p' include/sluice.h)
MAN := $(wildcard docs/man/*.1)
DEST = $(DESTDIR)$(PREFIX)
install: all
	install -d $(DEST)/bin $(DEST)/include $(DEST)/lib/pkgconfig $(DEST)/share/man/man1
	install -m 755 -s bin/sluice $(DEST)/bin/
	install -m 644 include/sluice.h $(DEST)/include/
	install -m 644 build/release/libsluice.a $(DEST)/lib/
	install -m 644 $(MAN) $(DEST)/share/man/man1/
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@PKGS@|$(PKGS)|' sluice.pc.in >$(DEST)/lib/pkgconfig/sluice.pc
uninstall:
	rm -f $(DEST)/bin/sluice $(DEST)/include/sluice.h $(DEST)/lib/libsluice.a $(DEST)/lib/pkgconfig/sluice.pc \
	    $(MAN:docs/man/%=$(DEST)/share/man/man1/%)
deps:
	scripts/deps test lint
bench:
	@echo "bench: see docs/benchmarking.md"
bench-kernels: $(B)/bench/kernels
$(B)/bench/%: $(B)/bench/%.o $(LIB)
	$(LINK)
clean:
	rm -rf build bin
help:
	@sed -n 's/^# make/make/p' Makefile
	@echo "make check       tests of this CONFIG ($(CONFIG)); check-san, check-clang, check-arm64: of that one"
	@echo "make check-e2e   end-to-end tests"
	@echo "make lint        clang-tidy and cppcheck"
	@echo "make fuzz T=NAME [SECONDS=60]   NAME: $(FUZZ)"
	@echo "make install     PREFIX=$(PREFIX), DESTDIR=$(DESTDIR); also uninstall"
	@echo "make deps        install what tests and analysis need; clean; CONFIG=release|clang|arm64|asan|tsan"

-include $(OBJ:.o=.d) $(CMD_OBJ:.o=.d) $(TEST_BIN:=.d) $(FUZZ:%=$(B)/tests/fuzz/fuzz_%.d)
.PHONY: all tests tests-list check check-san check-clang check-arm64 check-e2e test needs demo lint fuzz \
    install uninstall deps bench bench-kernels clean help
.SECONDARY:
.DELETE_ON_ERROR:
